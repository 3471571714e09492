// wgmma.mma_async with both operands in shared memory, for every N that the hardware has (PTX ISA, wgmma.mma_async). CuTe
// has them as well, but all types and forms in one header, which doubles a kernel's compile time.

#pragma once

#include <cstdint>

#include "cute/atom/mma_traits_sm90_gmma.hpp"
#include "cute/tensor.hpp"

namespace cutlass_ops {

// D (64, N) += A (64, K) B (K, N), K being 32 bytes, FP32 accumulators, issued by one warpgroup.
template <int N, class ElementA, class ElementB>
struct WgmmaIssue;

// Names and operands of the accumulator's registers, four of a thread's for eight columns.
#define CUTLASS_OPS_REGISTERS_8 "%0, %1, %2, %3"
#define CUTLASS_OPS_REGISTERS_16 CUTLASS_OPS_REGISTERS_8 ", %4, %5, %6, %7"
#define CUTLASS_OPS_REGISTERS_24 CUTLASS_OPS_REGISTERS_16 ", %8, %9, %10, %11"
#define CUTLASS_OPS_REGISTERS_32 CUTLASS_OPS_REGISTERS_24 ", %12, %13, %14, %15"
#define CUTLASS_OPS_REGISTERS_40 CUTLASS_OPS_REGISTERS_32 ", %16, %17, %18, %19"
#define CUTLASS_OPS_REGISTERS_48 CUTLASS_OPS_REGISTERS_40 ", %20, %21, %22, %23"
#define CUTLASS_OPS_REGISTERS_56 CUTLASS_OPS_REGISTERS_48 ", %24, %25, %26, %27"
#define CUTLASS_OPS_REGISTERS_64 CUTLASS_OPS_REGISTERS_56 ", %28, %29, %30, %31"
#define CUTLASS_OPS_REGISTERS_72 CUTLASS_OPS_REGISTERS_64 ", %32, %33, %34, %35"
#define CUTLASS_OPS_REGISTERS_80 CUTLASS_OPS_REGISTERS_72 ", %36, %37, %38, %39"
#define CUTLASS_OPS_REGISTERS_88 CUTLASS_OPS_REGISTERS_80 ", %40, %41, %42, %43"
#define CUTLASS_OPS_REGISTERS_96 CUTLASS_OPS_REGISTERS_88 ", %44, %45, %46, %47"
#define CUTLASS_OPS_REGISTERS_104 CUTLASS_OPS_REGISTERS_96 ", %48, %49, %50, %51"
#define CUTLASS_OPS_REGISTERS_112 CUTLASS_OPS_REGISTERS_104 ", %52, %53, %54, %55"
#define CUTLASS_OPS_REGISTERS_120 CUTLASS_OPS_REGISTERS_112 ", %56, %57, %58, %59"
#define CUTLASS_OPS_REGISTERS_128 CUTLASS_OPS_REGISTERS_120 ", %60, %61, %62, %63"
#define CUTLASS_OPS_REGISTERS_136 CUTLASS_OPS_REGISTERS_128 ", %64, %65, %66, %67"
#define CUTLASS_OPS_REGISTERS_144 CUTLASS_OPS_REGISTERS_136 ", %68, %69, %70, %71"
#define CUTLASS_OPS_REGISTERS_152 CUTLASS_OPS_REGISTERS_144 ", %72, %73, %74, %75"
#define CUTLASS_OPS_REGISTERS_160 CUTLASS_OPS_REGISTERS_152 ", %76, %77, %78, %79"
#define CUTLASS_OPS_REGISTERS_168 CUTLASS_OPS_REGISTERS_160 ", %80, %81, %82, %83"
#define CUTLASS_OPS_REGISTERS_176 CUTLASS_OPS_REGISTERS_168 ", %84, %85, %86, %87"
#define CUTLASS_OPS_REGISTERS_184 CUTLASS_OPS_REGISTERS_176 ", %88, %89, %90, %91"
#define CUTLASS_OPS_REGISTERS_192 CUTLASS_OPS_REGISTERS_184 ", %92, %93, %94, %95"
#define CUTLASS_OPS_REGISTERS_200 CUTLASS_OPS_REGISTERS_192 ", %96, %97, %98, %99"
#define CUTLASS_OPS_REGISTERS_208 CUTLASS_OPS_REGISTERS_200 ", %100, %101, %102, %103"
#define CUTLASS_OPS_REGISTERS_216 CUTLASS_OPS_REGISTERS_208 ", %104, %105, %106, %107"
#define CUTLASS_OPS_REGISTERS_224 CUTLASS_OPS_REGISTERS_216 ", %108, %109, %110, %111"
#define CUTLASS_OPS_REGISTERS_232 CUTLASS_OPS_REGISTERS_224 ", %112, %113, %114, %115"
#define CUTLASS_OPS_REGISTERS_240 CUTLASS_OPS_REGISTERS_232 ", %116, %117, %118, %119"
#define CUTLASS_OPS_REGISTERS_248 CUTLASS_OPS_REGISTERS_240 ", %120, %121, %122, %123"
#define CUTLASS_OPS_REGISTERS_256 CUTLASS_OPS_REGISTERS_248 ", %124, %125, %126, %127"

#define CUTLASS_OPS_OPERANDS_8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define CUTLASS_OPS_OPERANDS_16 CUTLASS_OPS_OPERANDS_8, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define CUTLASS_OPS_OPERANDS_24 CUTLASS_OPS_OPERANDS_16, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define CUTLASS_OPS_OPERANDS_32 CUTLASS_OPS_OPERANDS_24, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define CUTLASS_OPS_OPERANDS_40 CUTLASS_OPS_OPERANDS_32, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define CUTLASS_OPS_OPERANDS_48 CUTLASS_OPS_OPERANDS_40, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define CUTLASS_OPS_OPERANDS_56 CUTLASS_OPS_OPERANDS_48, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define CUTLASS_OPS_OPERANDS_64 CUTLASS_OPS_OPERANDS_56, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define CUTLASS_OPS_OPERANDS_72 CUTLASS_OPS_OPERANDS_64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define CUTLASS_OPS_OPERANDS_80 CUTLASS_OPS_OPERANDS_72, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define CUTLASS_OPS_OPERANDS_88 CUTLASS_OPS_OPERANDS_80, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define CUTLASS_OPS_OPERANDS_96 CUTLASS_OPS_OPERANDS_88, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define CUTLASS_OPS_OPERANDS_104 CUTLASS_OPS_OPERANDS_96, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define CUTLASS_OPS_OPERANDS_112 CUTLASS_OPS_OPERANDS_104, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define CUTLASS_OPS_OPERANDS_120 CUTLASS_OPS_OPERANDS_112, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define CUTLASS_OPS_OPERANDS_128 CUTLASS_OPS_OPERANDS_120, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define CUTLASS_OPS_OPERANDS_136 CUTLASS_OPS_OPERANDS_128, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define CUTLASS_OPS_OPERANDS_144 CUTLASS_OPS_OPERANDS_136, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define CUTLASS_OPS_OPERANDS_152 CUTLASS_OPS_OPERANDS_144, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define CUTLASS_OPS_OPERANDS_160 CUTLASS_OPS_OPERANDS_152, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define CUTLASS_OPS_OPERANDS_168 CUTLASS_OPS_OPERANDS_160, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define CUTLASS_OPS_OPERANDS_176 CUTLASS_OPS_OPERANDS_168, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define CUTLASS_OPS_OPERANDS_184 CUTLASS_OPS_OPERANDS_176, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define CUTLASS_OPS_OPERANDS_192 CUTLASS_OPS_OPERANDS_184, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define CUTLASS_OPS_OPERANDS_200 CUTLASS_OPS_OPERANDS_192, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define CUTLASS_OPS_OPERANDS_208 CUTLASS_OPS_OPERANDS_200, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define CUTLASS_OPS_OPERANDS_216 CUTLASS_OPS_OPERANDS_208, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define CUTLASS_OPS_OPERANDS_224 CUTLASS_OPS_OPERANDS_216, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define CUTLASS_OPS_OPERANDS_232 CUTLASS_OPS_OPERANDS_224, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define CUTLASS_OPS_OPERANDS_240 CUTLASS_OPS_OPERANDS_232, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define CUTLASS_OPS_OPERANDS_248 CUTLASS_OPS_OPERANDS_240, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define CUTLASS_OPS_OPERANDS_256 CUTLASS_OPS_OPERANDS_248, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

// The numbers of the operands that say whether A and B are contiguous along M or N instead of K. Types that lie along K only
// have none.
#define CUTLASS_OPS_WGMMA_MAJORS_true(TA, TB) ", %" #TA ", %" #TB
#define CUTLASS_OPS_WGMMA_MAJORS_false(TA, TB) ""

// N, then the numbers of the operands that follow the accumulators: both descriptors, whether to accumulate, the majors.
#define CUTLASS_OPS_WGMMA_OF(N, A, B, P, TA, TB, ElementA, ElementB, types, any_major)                      \
  template <>                                                                                               \
  struct cutlass_ops::WgmmaIssue<N, ElementA, ElementB> {                                                   \
    template <int kFreeA, int kFreeB>                                                                       \
    CUTE_DEVICE static void issue(float* d, uint64_t a, uint64_t b, int accumulate) {                       \
      static_assert(any_major || (kFreeA == 0 && kFreeB == 0), "wgmma reads these types along K only");     \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N     \
                   types " {" CUTLASS_OPS_REGISTERS_##N "}, %" #A ", %" #B ", p, 1, 1"                      \
                   CUTLASS_OPS_WGMMA_MAJORS_##any_major(TA, TB) ";\n}\n"                                    \
                   : CUTLASS_OPS_OPERANDS_##N                                                               \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(kFreeA), "n"(kFreeB));                            \
    }                                                                                                       \
  };

// The instructions for one pair of types: a kernel's source has the pair that it multiplies. `types` is what their names have
// after N, such as "k16.f32.bf16.bf16".
#define CUTLASS_OPS_WGMMA(...)                                          \
  CUTLASS_OPS_WGMMA_OF(8, 4, 5, 6, 7, 8, __VA_ARGS__)                   \
  CUTLASS_OPS_WGMMA_OF(16, 8, 9, 10, 11, 12, __VA_ARGS__)               \
  CUTLASS_OPS_WGMMA_OF(24, 12, 13, 14, 15, 16, __VA_ARGS__)             \
  CUTLASS_OPS_WGMMA_OF(32, 16, 17, 18, 19, 20, __VA_ARGS__)             \
  CUTLASS_OPS_WGMMA_OF(40, 20, 21, 22, 23, 24, __VA_ARGS__)             \
  CUTLASS_OPS_WGMMA_OF(48, 24, 25, 26, 27, 28, __VA_ARGS__)             \
  CUTLASS_OPS_WGMMA_OF(56, 28, 29, 30, 31, 32, __VA_ARGS__)             \
  CUTLASS_OPS_WGMMA_OF(64, 32, 33, 34, 35, 36, __VA_ARGS__)             \
  CUTLASS_OPS_WGMMA_OF(72, 36, 37, 38, 39, 40, __VA_ARGS__)             \
  CUTLASS_OPS_WGMMA_OF(80, 40, 41, 42, 43, 44, __VA_ARGS__)             \
  CUTLASS_OPS_WGMMA_OF(88, 44, 45, 46, 47, 48, __VA_ARGS__)             \
  CUTLASS_OPS_WGMMA_OF(96, 48, 49, 50, 51, 52, __VA_ARGS__)             \
  CUTLASS_OPS_WGMMA_OF(104, 52, 53, 54, 55, 56, __VA_ARGS__)            \
  CUTLASS_OPS_WGMMA_OF(112, 56, 57, 58, 59, 60, __VA_ARGS__)            \
  CUTLASS_OPS_WGMMA_OF(120, 60, 61, 62, 63, 64, __VA_ARGS__)            \
  CUTLASS_OPS_WGMMA_OF(128, 64, 65, 66, 67, 68, __VA_ARGS__)            \
  CUTLASS_OPS_WGMMA_OF(136, 68, 69, 70, 71, 72, __VA_ARGS__)            \
  CUTLASS_OPS_WGMMA_OF(144, 72, 73, 74, 75, 76, __VA_ARGS__)            \
  CUTLASS_OPS_WGMMA_OF(152, 76, 77, 78, 79, 80, __VA_ARGS__)            \
  CUTLASS_OPS_WGMMA_OF(160, 80, 81, 82, 83, 84, __VA_ARGS__)            \
  CUTLASS_OPS_WGMMA_OF(168, 84, 85, 86, 87, 88, __VA_ARGS__)            \
  CUTLASS_OPS_WGMMA_OF(176, 88, 89, 90, 91, 92, __VA_ARGS__)            \
  CUTLASS_OPS_WGMMA_OF(184, 92, 93, 94, 95, 96, __VA_ARGS__)            \
  CUTLASS_OPS_WGMMA_OF(192, 96, 97, 98, 99, 100, __VA_ARGS__)           \
  CUTLASS_OPS_WGMMA_OF(200, 100, 101, 102, 103, 104, __VA_ARGS__)       \
  CUTLASS_OPS_WGMMA_OF(208, 104, 105, 106, 107, 108, __VA_ARGS__)       \
  CUTLASS_OPS_WGMMA_OF(216, 108, 109, 110, 111, 112, __VA_ARGS__)       \
  CUTLASS_OPS_WGMMA_OF(224, 112, 113, 114, 115, 116, __VA_ARGS__)       \
  CUTLASS_OPS_WGMMA_OF(232, 116, 117, 118, 119, 120, __VA_ARGS__)       \
  CUTLASS_OPS_WGMMA_OF(240, 120, 121, 122, 123, 124, __VA_ARGS__)       \
  CUTLASS_OPS_WGMMA_OF(248, 124, 125, 126, 127, 128, __VA_ARGS__)       \
  CUTLASS_OPS_WGMMA_OF(256, 128, 129, 130, 131, 132, __VA_ARGS__)       

// The instruction as CuTe's MMA operation, which only says where its results lie: the main loop issues it.
template <int N, class ElementA, class ElementB, cute::GMMA::Major kMajorA, cute::GMMA::Major kMajorB>
struct Wgmma {
  CUTE_DEVICE static void fma(float* d, uint64_t a, uint64_t b, cute::GMMA::ScaleOut scale) {
    WgmmaIssue<N, ElementA, ElementB>::template issue<int(kMajorA), int(kMajorB)>(d, a, b, int(scale));
  }
};

}  // namespace cutlass_ops

template <int N, class ElementA, class ElementB, cute::GMMA::Major kMajorA, cute::GMMA::Major kMajorB>
struct cute::MMA_Traits<cutlass_ops::Wgmma<N, ElementA, ElementB, kMajorA, kMajorB>> {
  using ValTypeD = float;
  using ValTypeA = ElementA;
  using ValTypeB = ElementB;
  using ValTypeC = float;
  using FrgTypeA = cute::GMMA::smem_desc<kMajorA>;
  using FrgTypeB = cute::GMMA::smem_desc<kMajorB>;
  static_assert(sizeof(ElementA) == sizeof(ElementB));
  static constexpr int kK = 32 / sizeof(ElementA);
  using Shape_MNK = cute::Shape<cute::_64, cute::Int<N>, cute::Int<kK>>;
  using ThrID = cute::Layout<cute::_128>;
  using ALayout = cute::GMMA::ABLayout<64, kK>;
  using BLayout = cute::GMMA::ABLayout<N, kK>;
  using CLayout = cute::GMMA::CLayout_64xN<N>;
};
