// A kernel for many small GEMMs, such as a thousand of 64x64x64. Each warp computes tiles of its own, and waits for no other
// warp. While it multiplies one, the operands of its next ones are on their way to shared memory. So most of a problem's
// batches are on their way at a time. Operands and outputs may have any alignment. It runs on Sm80 and everything later.

#pragma once

#include <algorithm>
#include <atomic>

#include "cutlass_ops/halves.h"

#include "cutlass_ops/batched.h"
#include "cutlass_ops/elements.h"
#include "cutlass_ops/epilogue_math.h"

namespace cutlass_ops {
namespace small {

// ---- What an epilogue reads and writes, of one batch ----------------------------------------------------------------

template <class Element>
CUTLASS_DEVICE Matrix at(BatchedMatrix const& x, int batch, int extent) {
  Matrix own = x;
  own.data = static_cast<Element*>(x.data) + x.batches.offset(batch, extent);
  return own;
}
template <class Element>
CUTLASS_DEVICE Element const* at(BatchedVector<Element> const& x, int batch, int extent) {
  return x.values + x.batches.offset(batch, extent);
}
template <class Element>
CUTLASS_DEVICE Scalar<Element> const& at(Scalar<Element> const& x, int, int) {
  return x;
}

// ---- Operands -------------------------------------------------------------------------------------------------------

// A warp's part of an operand in shared memory, as it lies in memory: `kLines` lines of `kLength` elements, of which the last
// ones may be beyond the matrix. Lines are 16 bytes longer, so that those of a matrix of 8 by 8 begin in different banks.
template <class Element, int kLines, int kLength, int kAlignment>
struct Part {
  static constexpr int kPitch = kLength + 8, kElements = kLines * kPitch;
  static constexpr int kAccess = kAlignment, kAccesses = kLength / kAccess;
  static_assert(sizeof(Element) == 2 && kLength % 16 == 0 && kAlignment <= 8);

  // Begins to copy a part whose first element is at `from`; zeros where there are no lines or elements.
  CUTLASS_DEVICE static void load(Element* to, Element const* from, int64_t ld, int lines, int length, int lane) {
#pragma unroll 4
    for (int i = lane; i < kLines * kAccesses; i += 32) {
      int const line = i / kAccesses, first = i % kAccesses * kAccess;
      // Extents along lines are multiples of an access: all of it is there, or nothing.
      int const there = line < lines && first < length ? kAccess : 0;
      Element* const place = to + line * kPitch + first;
      Element const* const source = from + (there > 0 ? line * ld + first : 0);
      if constexpr (kAccess == 1) {
        *place = there > 0 ? *source : Element(0.0f);
      } else {
        constexpr int kBytes = kAccess * int(sizeof(Element));
        uint32_t const shared = uint32_t(__cvta_generic_to_shared(place));
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(source), "n"(kBytes),
                     "r"(there * int(sizeof(Element))) : "memory");
      }
    }
  }
};

template <class Element>
CUTLASS_DEVICE void load_matrices(uint32_t (&to)[4], Element const* from, bool transposed) {
  uint32_t const shared = uint32_t(__cvta_generic_to_shared(from));
  if (transposed) {
    asm volatile("ldmatrix.sync.aligned.x4.trans.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared) : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.x4.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared) : "memory");
  }
}

template <class Element>
CUTLASS_DEVICE void mma(float (&sums)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (cutlass::platform::is_same<Element, cutlass::half_t>::value) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// ---- Kernel ---------------------------------------------------------------------------------------------------------

// Rows and columns of a warp's tile, K of a step, steps that it loads ahead, and warps of a thread block.
template <int kRows_, int kColumns_, int kDepth_, int kStages_, int kWarps_>
struct Shape {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kDepth = kDepth_, kStages = kStages_, kWarps = kWarps_;
};

// `Small` is what a rendered file defines:
//   Element; Shape; MajorA, MajorB, MajorD; AlignmentA, AlignmentB, AlignmentD; ElementD
//   struct Operands { Problem problem; BatchedMatrix a, b, d; ... };
//   struct Own { Matrix d; ... };  the same of one batch, without A and B
//   static Own own(Operands const&, int batch);
//   static float compute(Own const&, int row, int column, float acc);  gives an element of D, stores those of further outputs
template <class Small>
struct Kernel {
  using Params = typename Small::Operands;
  using Shape = typename Small::Shape;
  using Element = typename Small::Element;
  using ElementD = typename Small::ElementOfD;
  static constexpr int kRows = Shape::kRows, kColumns = Shape::kColumns, kDepth = Shape::kDepth;
  static constexpr int kStages = Shape::kStages, kWarps = Shape::kWarps, kThreads = 32 * kWarps;
  static constexpr bool kRowsOfA = Small::kMajorA == Major::kRow, kRowsOfB = Small::kMajorB == Major::kRow;
  using A = Part<Element, (kRowsOfA ? kRows : kDepth), (kRowsOfA ? kDepth : kRows), Small::kAlignmentA>;
  using B = Part<Element, (kRowsOfB ? kDepth : kColumns), (kRowsOfB ? kColumns : kDepth), Small::kAlignmentB>;
  static constexpr int kStage = A::kElements + B::kElements;  // elements
  // Sums pass through shared memory, so that neighbours of a line of D come to one thread.
  static constexpr int kSumPitch = kColumns + 4, kSumRows = 16;
  static constexpr int kWarpBytes = kStages * kStage * int(sizeof(Element)) + kSumRows * kSumPitch * int(sizeof(float));
  static constexpr int kSharedMemory = kWarps * kWarpBytes;
  static_assert(kWarpBytes % 16 == 0);

  // A tile: a batch and a place in its D.
  struct Tile {
    int batch, row, column;
  };

  CUTLASS_DEVICE static Tile tile(Params const& params, int number) {
    int const rows = (params.problem.m + kRows - 1) / kRows, columns = (params.problem.n + kColumns - 1) / kColumns;
    int const batch = number / (rows * columns), within = number - batch * rows * columns;
    return {batch, within / columns * kRows, within % columns * kColumns};
  }

  CUTLASS_DEVICE static void run(Params const& params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    // What wrote the operands has ended after this.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    extern __shared__ __align__(16) char shared_memory[];
    int const warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
    char* const own = shared_memory + warp * kWarpBytes;
    auto* const stages = reinterpret_cast<Element*>(own);
    auto* const sums = reinterpret_cast<float*>(own + kStages * kStage * sizeof(Element));
    auto const& p = params.problem;
    int const tiles = (p.m + kRows - 1) / kRows * ((p.n + kColumns - 1) / kColumns) * p.count;
    int const steps = (p.k + kDepth - 1) / kDepth, every = int(gridDim.x) * kWarps;
    // Neighbouring tiles go to different multiprocessors.
    int number = int(blockIdx.x) + warp * int(gridDim.x);

    // What is loaded next: a step of a tile, up to `kStages - 1` ahead of what is multiplied.
    int next = number, next_step = 0, filled = 0;
    auto const fill = [&] {
      if (next < tiles) load(params, tile(params, next), next_step * kDepth, stages + filled * kStage, lane);
      asm volatile("cp.async.commit_group;" ::: "memory");  // an empty one too, so that they can be counted
      filled = filled + 1 == kStages ? 0 : filled + 1;
      if (++next_step == steps) next_step = 0, next += every;
    };
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kStages - 1; ++i) fill();

    int stage = 0;
    for (; number < tiles; number += every) {
      float products[kRows / 16][kColumns / 8][4] = {};
      for (int step = 0; step < steps; ++step) {
        asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
        __syncwarp();  // other lanes' copies have come, and what they read of the stage that is filled now has been read
        fill();
        multiply(products, stages + stage * kStage, p.k - step * kDepth, lane);
        stage = stage + 1 == kStages ? 0 : stage + 1;
      }
      store(params, tile(params, number), products, sums, lane);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

 private:
  CUTLASS_DEVICE static void load(Params const& params, Tile const& tile, int k, Element* stage, int lane) {
    auto const& p = params.problem;
    int const rows = p.m - tile.row, columns = p.n - tile.column, depth = p.k - k;
    auto const* const a = static_cast<Element const*>(params.a.data) + params.a.batches.offset(tile.batch, p.inner);
    auto const* const b = static_cast<Element const*>(params.b.data) + params.b.batches.offset(tile.batch, p.inner);
    if constexpr (kRowsOfA) {
      A::load(stage, a + tile.row * params.a.ld + k, params.a.ld, rows, depth, lane);
    } else {
      A::load(stage, a + tile.row + k * params.a.ld, params.a.ld, depth, rows, lane);
    }
    if constexpr (kRowsOfB) {
      B::load(stage + A::kElements, b + k * params.b.ld + tile.column, params.b.ld, depth, columns, lane);
    } else {
      B::load(stage + A::kElements, b + k + tile.column * params.b.ld, params.b.ld, columns, depth, lane);
    }
  }

  CUTLASS_DEVICE static void multiply(float (&products)[kRows / 16][kColumns / 8][4], Element const* stage, int depth, int lane) {
    Element const* const b = stage + A::kElements;
    int const upper = lane % 8, second = lane / 8 % 2 * 8, third = lane / 16 * 8;
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < kDepth; k += 16) {
      if (k >= depth) break;
      uint32_t of_a[kRows / 16][4];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRows / 16; ++i) {
        int const row = i * 16 + second, column = k + third;
        load_matrices(of_a[i], kRowsOfA ? stage + (row + upper) * A::kPitch + column : stage + (column + upper) * A::kPitch + row,
                      !kRowsOfA);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kColumns / 16; ++j) {
        uint32_t of_b[4];
        int const row = k + second, column = j * 16 + third;
        load_matrices(of_b, kRowsOfB ? b + (row + upper) * B::kPitch + column : b + (column + upper) * B::kPitch + row, kRowsOfB);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kRows / 16; ++i) {
          mma<Element>(products[i][2 * j], of_a[i], of_b[0], of_b[1]);
          mma<Element>(products[i][2 * j + 1], of_a[i], of_b[2], of_b[3]);
        }
      }
    }
  }

  // Sixteen rows of the tile at a time.
  CUTLASS_DEVICE static void store(Params const& params, Tile const& tile, float const (&products)[kRows / 16][kColumns / 8][4],
                                   float* sums, int lane) {
    constexpr bool kByRows = Small::kMajorD == Major::kRow;
    // Neighbours in memory that one thread stores together.
    constexpr int kAlong = kByRows ? kColumns : kSumRows, kVector = Small::kAlignmentD < kAlong ? Small::kAlignmentD : kAlong;
    constexpr int kVectors = kSumRows * kColumns / kVector;
    auto const& p = params.problem;
    typename Small::Own const own = Small::own(params, tile.batch);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows / 16; ++i) {
      if (tile.row + i * 16 >= p.m) break;
      __syncwarp();
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kColumns / 8; ++j) {
        float* const place = sums + lane / 4 * kSumPitch + j * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(place) = {products[i][j][0], products[i][j][1]};
        *reinterpret_cast<float2*>(place + 8 * kSumPitch) = {products[i][j][2], products[i][j][3]};
      }
      __syncwarp();
      for (int at = lane; at < kVectors; at += 32) {
        int const row = kByRows ? at / (kColumns / kVector) : at % (kSumRows / kVector) * kVector;
        int const column = kByRows ? at % (kColumns / kVector) * kVector : at / (kSumRows / kVector);
        int const m = tile.row + i * 16 + row, n = tile.column + column;
        if (m >= p.m || n >= p.n) continue;
        // D's extent along its lines is a multiple of the vector, so all of it is there.
        cutlass::AlignedArray<ElementD, kVector> found;
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < kVector; ++v) {
          int const down = kByRows ? 0 : v, across = kByRows ? v : 0;
          found[v] = ElementD(Small::compute(own, m + down, n + across, sums[(row + down) * kSumPitch + column + across]));
        }
        *reinterpret_cast<cutlass::AlignedArray<ElementD, kVector>*>(&element<ElementD, Small::kMajorD>(own.d, m, n)) = found;
      }
    }
  }
};

}  // namespace small

#if CUTLASS_OPS_HOST

// Besides what the kernel needs, `Small` has
//   static void const* kernel(); static Operands operands(Call&);
//   static constexpr bool kOverlaps;  whether the machine code waits for the end of the kernel before it
template <class Small>
struct SmallEntry {
  using Kernel = small::Kernel<Small>;
  using Operands = typename Small::Operands;

  static cudaError_t launch(Call& call, int& status) {
    Operands const operands = Small::operands(call);
    call.integer();  // order and width of strips of tiles: there is one order
    call.integer();
    call.workspace(0);
    status = call.status();
    if (status != 0) return cudaSuccess;
    DeviceGuard const guard(call.device());
    int blocks = 0;
    if (cudaError_t const error = most_blocks(call.device(), blocks); error != cudaSuccess) return error;
    auto const& p = operands.problem;
    int64_t const tiles = (int64_t(p.m) + Kernel::kRows - 1) / Kernel::kRows * ((int64_t(p.n) + Kernel::kColumns - 1) / Kernel::kColumns) * p.count;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(std::min<int64_t>(blocks, (tiles + Kernel::kWarps - 1) / Kernel::kWarps)));
    config.blockDim = dim3(Kernel::kThreads);
    config.dynamicSmemBytes = Kernel::kSharedMemory;
    config.attrs = &attribute;
    config.numAttrs = Small::kOverlaps ? 1 : 0;
    return call.queue().launch(config, Small::kernel(), operands);
  }

  static int64_t workspace_size(Problem, int, int) { return 0; }

  static cudaError_t load(int device) {
    int blocks = 0;
    return most_blocks(device, blocks);
  }

  static Description describe() { return {Kernel::kStages, Kernel::kThreads, Kernel::kSharedMemory}; }

 private:
  // As many thread blocks as run at a time. Asked for once a device, since the question costs microseconds.
  static cudaError_t most_blocks(int device, int& blocks) {
    static std::atomic<int> known[kMaxDevices] = {};
    blocks = known[device].load(std::memory_order_acquire);
    if (blocks != 0) return cudaSuccess;
    cudaError_t error =
        cudaFuncSetAttribute(Small::kernel(), cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::kSharedMemory);
    int each = 0, multiprocessors = 0;
    if (error == cudaSuccess) {
      error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, Small::kernel(), Kernel::kThreads, Kernel::kSharedMemory);
    }
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    blocks = std::max(1, each * multiprocessors);
    known[device].store(blocks, std::memory_order_release);
    return cudaSuccess;
  }
};

#endif  // CUTLASS_OPS_HOST

}  // namespace cutlass_ops
