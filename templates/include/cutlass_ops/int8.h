// wgmma of 8-bit integers, whose accumulators are whole numbers of 32 bits (PTX ISA, wgmma.mma_async). Both operands lie along K, and
// N has fewer values than with other types. The epilogue converts sums to FP32 as it reads them, unless D is the sums.

#pragma once

#include "cutlass/epilogue/fusion/callbacks.hpp"

#include "cutlass_ops/wgmma.h"

namespace cutlass_ops {

// What a visitor of D (Element) computes, for CUTLASS's collective: that takes its values to be of the accumulators' type, unless
// they have traits.
template <class Visitor, class Element>
struct IntegerCallbacks : Visitor {
  using ElementAux = Element;
  using Visitor::Visitor;
};

// An epilogue for a D in INT32: it takes sums as the bits of FP32 values, which it moves and does not compute with.
template <class Base>
struct BitsOfSums : Base {
  using Base::Base;

  template <class Load, class Loaded, class Store, class Stored, class Problem, class Tile, class Coord, class Engine,
            class Layout, class... Rest>
  CUTLASS_DEVICE auto store(Load load, Loaded loaded, Store store, Stored stored, Problem const& problem, Tile tile,
                            Coord const& coord, cute::Tensor<Engine, Layout> const& sums, Rest&&... rest) {
    auto bits = cute::make_tensor<float>(sums.layout());
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < int(cute::size(sums)); ++i) bits(i) = __int_as_float(sums(i));
    return Base::store(load, loaded, store, stored, problem, tile, coord, bits, static_cast<Rest&&>(rest)...);
  }
};

// D (64, N) += A (64, 32) B (32, N), issued by one warpgroup.
template <int N>
struct IntegerWgmmaIssue;

// Operands of the accumulator's registers: CUTLASS_OPS_OPERANDS_8 and so on, of integers.
#define CUTLASS_OPS_INTEGERS_8 "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
#define CUTLASS_OPS_INTEGERS_16 CUTLASS_OPS_INTEGERS_8, "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7])
#define CUTLASS_OPS_INTEGERS_24 CUTLASS_OPS_INTEGERS_16, "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11])
#define CUTLASS_OPS_INTEGERS_32 CUTLASS_OPS_INTEGERS_24, "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15])
#define CUTLASS_OPS_INTEGERS_40 CUTLASS_OPS_INTEGERS_32, "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19])
#define CUTLASS_OPS_INTEGERS_48 CUTLASS_OPS_INTEGERS_40, "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23])
#define CUTLASS_OPS_INTEGERS_56 CUTLASS_OPS_INTEGERS_48, "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27])
#define CUTLASS_OPS_INTEGERS_64 CUTLASS_OPS_INTEGERS_56, "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31])
#define CUTLASS_OPS_INTEGERS_72 CUTLASS_OPS_INTEGERS_64, "+r"(d[32]), "+r"(d[33]), "+r"(d[34]), "+r"(d[35])
#define CUTLASS_OPS_INTEGERS_80 CUTLASS_OPS_INTEGERS_72, "+r"(d[36]), "+r"(d[37]), "+r"(d[38]), "+r"(d[39])
#define CUTLASS_OPS_INTEGERS_88 CUTLASS_OPS_INTEGERS_80, "+r"(d[40]), "+r"(d[41]), "+r"(d[42]), "+r"(d[43])
#define CUTLASS_OPS_INTEGERS_96 CUTLASS_OPS_INTEGERS_88, "+r"(d[44]), "+r"(d[45]), "+r"(d[46]), "+r"(d[47])
#define CUTLASS_OPS_INTEGERS_104 CUTLASS_OPS_INTEGERS_96, "+r"(d[48]), "+r"(d[49]), "+r"(d[50]), "+r"(d[51])
#define CUTLASS_OPS_INTEGERS_112 CUTLASS_OPS_INTEGERS_104, "+r"(d[52]), "+r"(d[53]), "+r"(d[54]), "+r"(d[55])
#define CUTLASS_OPS_INTEGERS_120 CUTLASS_OPS_INTEGERS_112, "+r"(d[56]), "+r"(d[57]), "+r"(d[58]), "+r"(d[59])
#define CUTLASS_OPS_INTEGERS_128 CUTLASS_OPS_INTEGERS_120, "+r"(d[60]), "+r"(d[61]), "+r"(d[62]), "+r"(d[63])
#define CUTLASS_OPS_INTEGERS_136 CUTLASS_OPS_INTEGERS_128, "+r"(d[64]), "+r"(d[65]), "+r"(d[66]), "+r"(d[67])
#define CUTLASS_OPS_INTEGERS_144 CUTLASS_OPS_INTEGERS_136, "+r"(d[68]), "+r"(d[69]), "+r"(d[70]), "+r"(d[71])
#define CUTLASS_OPS_INTEGERS_152 CUTLASS_OPS_INTEGERS_144, "+r"(d[72]), "+r"(d[73]), "+r"(d[74]), "+r"(d[75])
#define CUTLASS_OPS_INTEGERS_160 CUTLASS_OPS_INTEGERS_152, "+r"(d[76]), "+r"(d[77]), "+r"(d[78]), "+r"(d[79])
#define CUTLASS_OPS_INTEGERS_168 CUTLASS_OPS_INTEGERS_160, "+r"(d[80]), "+r"(d[81]), "+r"(d[82]), "+r"(d[83])
#define CUTLASS_OPS_INTEGERS_176 CUTLASS_OPS_INTEGERS_168, "+r"(d[84]), "+r"(d[85]), "+r"(d[86]), "+r"(d[87])
#define CUTLASS_OPS_INTEGERS_184 CUTLASS_OPS_INTEGERS_176, "+r"(d[88]), "+r"(d[89]), "+r"(d[90]), "+r"(d[91])
#define CUTLASS_OPS_INTEGERS_192 CUTLASS_OPS_INTEGERS_184, "+r"(d[92]), "+r"(d[93]), "+r"(d[94]), "+r"(d[95])
#define CUTLASS_OPS_INTEGERS_200 CUTLASS_OPS_INTEGERS_192, "+r"(d[96]), "+r"(d[97]), "+r"(d[98]), "+r"(d[99])
#define CUTLASS_OPS_INTEGERS_208 CUTLASS_OPS_INTEGERS_200, "+r"(d[100]), "+r"(d[101]), "+r"(d[102]), "+r"(d[103])
#define CUTLASS_OPS_INTEGERS_216 CUTLASS_OPS_INTEGERS_208, "+r"(d[104]), "+r"(d[105]), "+r"(d[106]), "+r"(d[107])
#define CUTLASS_OPS_INTEGERS_224 CUTLASS_OPS_INTEGERS_216, "+r"(d[108]), "+r"(d[109]), "+r"(d[110]), "+r"(d[111])
#define CUTLASS_OPS_INTEGERS_232 CUTLASS_OPS_INTEGERS_224, "+r"(d[112]), "+r"(d[113]), "+r"(d[114]), "+r"(d[115])
#define CUTLASS_OPS_INTEGERS_240 CUTLASS_OPS_INTEGERS_232, "+r"(d[116]), "+r"(d[117]), "+r"(d[118]), "+r"(d[119])
#define CUTLASS_OPS_INTEGERS_248 CUTLASS_OPS_INTEGERS_240, "+r"(d[120]), "+r"(d[121]), "+r"(d[122]), "+r"(d[123])
#define CUTLASS_OPS_INTEGERS_256 CUTLASS_OPS_INTEGERS_248, "+r"(d[124]), "+r"(d[125]), "+r"(d[126]), "+r"(d[127])

// N, then the numbers of the operands that follow the accumulators: both descriptors, and whether to accumulate.
#define CUTLASS_OPS_INTEGER_WGMMA_OF(N, A, B, P, types)                                                     \
  template <>                                                                                               \
  struct cutlass_ops::IntegerWgmmaIssue<N> {                                                                \
    CUTE_DEVICE static void issue(int32_t* d, uint64_t a, uint64_t b, int accumulate) {                     \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N     \
                   types " {" CUTLASS_OPS_REGISTERS_##N "}, %" #A ", %" #B ", p;\n}\n"                      \
                   : CUTLASS_OPS_INTEGERS_##N                                                               \
                   : "l"(a), "l"(b), "r"(accumulate));                                                      \
    }                                                                                                       \
  };

// The instructions, for a kernel's source. It names its types as for CUTLASS_OPS_WGMMA.
#define CUTLASS_OPS_INTEGER_WGMMA(ElementA, ElementB, types, any_major) \
  CUTLASS_OPS_INTEGER_WGMMA_OF(8, 4, 5, 6, types) \
  CUTLASS_OPS_INTEGER_WGMMA_OF(16, 8, 9, 10, types) \
  CUTLASS_OPS_INTEGER_WGMMA_OF(24, 12, 13, 14, types) \
  CUTLASS_OPS_INTEGER_WGMMA_OF(32, 16, 17, 18, types) \
  CUTLASS_OPS_INTEGER_WGMMA_OF(48, 24, 25, 26, types) \
  CUTLASS_OPS_INTEGER_WGMMA_OF(64, 32, 33, 34, types) \
  CUTLASS_OPS_INTEGER_WGMMA_OF(80, 40, 41, 42, types) \
  CUTLASS_OPS_INTEGER_WGMMA_OF(96, 48, 49, 50, types) \
  CUTLASS_OPS_INTEGER_WGMMA_OF(112, 56, 57, 58, types) \
  CUTLASS_OPS_INTEGER_WGMMA_OF(128, 64, 65, 66, types) \
  CUTLASS_OPS_INTEGER_WGMMA_OF(144, 72, 73, 74, types) \
  CUTLASS_OPS_INTEGER_WGMMA_OF(160, 80, 81, 82, types) \
  CUTLASS_OPS_INTEGER_WGMMA_OF(176, 88, 89, 90, types) \
  CUTLASS_OPS_INTEGER_WGMMA_OF(192, 96, 97, 98, types) \
  CUTLASS_OPS_INTEGER_WGMMA_OF(208, 104, 105, 106, types) \
  CUTLASS_OPS_INTEGER_WGMMA_OF(224, 112, 113, 114, types) \
  CUTLASS_OPS_INTEGER_WGMMA_OF(240, 120, 121, 122, types) \
  CUTLASS_OPS_INTEGER_WGMMA_OF(256, 128, 129, 130, types)

// The instruction as wgmma.h has those of other types.
template <int N, cute::GMMA::Major kMajorA, cute::GMMA::Major kMajorB>
struct Wgmma<N, int8_t, int8_t, kMajorA, kMajorB> {
  static_assert(kMajorA == cute::GMMA::Major::K && kMajorB == cute::GMMA::Major::K, "wgmma reads integers along K only");

  CUTE_DEVICE static void fma(int32_t* d, uint64_t a, uint64_t b, cute::GMMA::ScaleOut scale) {
    IntegerWgmmaIssue<N>::issue(d, a, b, int(scale));
  }
};

}  // namespace cutlass_ops

template <int N, cute::GMMA::Major kMajorA, cute::GMMA::Major kMajorB>
struct cute::MMA_Traits<cutlass_ops::Wgmma<N, int8_t, int8_t, kMajorA, kMajorB>> {
  using ValTypeD = int32_t;
  using ValTypeA = int8_t;
  using ValTypeB = int8_t;
  using ValTypeC = int32_t;
  using FrgTypeA = cute::GMMA::smem_desc<kMajorA>;
  using FrgTypeB = cute::GMMA::smem_desc<kMajorB>;
  using Shape_MNK = cute::Shape<cute::_64, cute::Int<N>, cute::_32>;
  using ThrID = cute::Layout<cute::_128>;
  using ALayout = cute::GMMA::ABLayout<64, 32>;
  using BLayout = cute::GMMA::ABLayout<N, 32>;
  using CLayout = cute::GMMA::CLayout_64xN<N>;
};

template <class Visitor, class Element>
struct cutlass::epilogue::fusion::FusionCallbacksTraits<cutlass_ops::IntegerCallbacks<Visitor, Element>> {
  using DispatchPolicy = void;
  using Callbacks = cutlass_ops::IntegerCallbacks<Visitor, Element>;
  using Operation = FusionOperation;
  using CtaTile_MNK = void;
  using EpilogueTile_MN = void;
  using ElementCompute = float;
};
