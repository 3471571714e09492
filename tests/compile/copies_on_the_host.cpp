// What the kernel that copies operands along K (along_k.h) makes of every kind of matrix, computed on the host: its threads one
// after the other, and the halves of a thread block one after the other. tests/compile/test_programs_on_the_host.py compiles it. It
// says "ok", or what is wrong.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>

#include "cutlass_ops/along_k.h"

using cutlass_ops::Major;
using cutlass_ops::Matrix;

// What the launch of a library gives to what prepares it, without a device.
struct Preparing {
  struct Queue {
    template <class Params>
    cudaError_t launch(cudaLaunchConfig_t const& config, void const*, Params const& params) const {
      using Lines = std::remove_cv_t<std::remove_reference_t<decltype(params.matrices[0])>>;
      run(config, params, Lines{});
      return cudaSuccess;
    }
    template <class Params, class Lines>
    static void run(cudaLaunchConfig_t const& config, Params const& params, Lines) {
      constexpr int kBytes = sizeof(*Lines{}.from);
      using Kernel = cutlass_ops::AlongK<kBytes>;
      auto const tile = std::make_unique<typename Kernel::Tile[]>(1);
      for (int64_t block = 0; block < config.gridDim.x; ++block) {
        int64_t own = block;
        for (auto const& matrix : params.matrices) {
          if (own < matrix.blocks) {
            std::memset(&tile[0], 0xEE, sizeof(tile[0]));
            for (int t = 0; matrix.across && t < Kernel::kThreads; ++t) Kernel::load(matrix, own, t, tile[0]);
            for (int t = 0; t < Kernel::kThreads; ++t) Kernel::store(matrix, own, t, tile[0]);
            break;
          }
          own -= matrix.blocks;
        }
      }
    }
  };
  char* scratch;
  bool overlap = false;
  Queue queue{};

  void* take(int64_t bytes) {
    char* const start = scratch;
    scratch += bytes;
    return start;
  }
};

std::mt19937 generator(0);

// A matrix in memory of exactly its size, `start` elements after an address that is a multiple of 16 bytes.
template <class Element, Major kMajor>
struct Drawn {
  int64_t rows, cols, ld;
  int start;
  std::unique_ptr<Element[]> memory;

  Drawn(int64_t rows, int64_t cols, int pad, int start)
      : rows(rows), cols(cols), ld((kMajor == Major::kRow ? cols : rows) + pad), start(start) {
    int64_t const lines = kMajor == Major::kRow ? rows : cols;
    int64_t const size = start + (lines - 1) * ld + (ld - pad);
    memory = std::make_unique<Element[]>(size);
    for (int64_t i = 0; i < size; ++i) memory[i] = Element(generator());
  }
  Matrix matrix() const { return {memory.get() + start, rows, cols, ld}; }
  Element operator()(int64_t row, int64_t col) const {
    return memory[start + (kMajor == Major::kRow ? row * ld + col : col * ld + row)];
  }
};

// Copies A (M, K) and B (K, N) in one launch, and compares.
template <class Element, Major kMajorA, Major kMajorB>
void check(int m, int n, int k, int pad, int start) {
  constexpr int kBytes = sizeof(Element);
  Drawn<Element, kMajorA> const a(m, k, pad, start);
  Drawn<Element, kMajorB> const b(k, n, pad, start);
  int64_t const bytes_a = cutlass_ops::along_k_bytes<kBytes>(m, k), bytes_b = cutlass_ops::along_k_bytes<kBytes>(n, k);
  auto const memory = std::make_unique<uint4[]>((bytes_a + bytes_b) / 16);
  std::memset(memory.get(), 0xDD, bytes_a + bytes_b);
  Preparing preparing{reinterpret_cast<char*>(memory.get())};
  Matrix of_a = a.matrix(), of_b = b.matrix();
  cutlass_ops::CopiedAlongK<kBytes> copies;
  copies.template add<kMajorA, Major::kRow>(of_a, preparing);
  copies.template add<kMajorB, Major::kCol>(of_b, preparing);
  if (copies.launch(nullptr, preparing) != cudaSuccess) std::printf("no launch\n"), std::exit(1);
  auto const compare = [&](Matrix const& copy, int lines, auto const& wanted) {
    bool good = copy.ld * kBytes % 16 == 0 && reinterpret_cast<uintptr_t>(copy.data) % 256 == reinterpret_cast<uintptr_t>(memory.get()) % 256;
    for (int64_t line = 0; line < lines; ++line) {
      for (int64_t at = 0; at < copy.ld; ++at) {
        good = good && copy.ptr<Element>()[line * copy.ld + at] == (at < k ? wanted(line, at) : Element(0));
      }
    }
    if (!good) {
      std::printf("%d bytes, A %s, B %s, %dx%dx%d, lines %d longer, from %d: wrong\n", kBytes,
                  kMajorA == Major::kRow ? "row" : "col", kMajorB == Major::kRow ? "row" : "col", m, n, k, pad, start);
      std::exit(1);
    }
  };
  compare(of_a, m, [&](int64_t line, int64_t at) { return a(line, at); });
  compare(of_b, n, [&](int64_t line, int64_t at) { return b(at, line); });
}

template <class Element>
void check_all() {
  int const extents[] = {1, 3, 16, 31, 32, 33, 127, 128, 129, 200};
  for (int k : extents) {
    for (int pad : {0, 1, 2, 4}) {
      for (int start : {0, 1, 3, 4}) {
        int const m = extents[generator() % 10], n = extents[generator() % 10];
        check<Element, Major::kRow, Major::kCol>(m, n, k, pad, start);
        check<Element, Major::kCol, Major::kRow>(m, n, k, pad, start);
        check<Element, Major::kRow, Major::kRow>(m, n, k, pad, start);
        check<Element, Major::kCol, Major::kCol>(m, n, k, pad, start);
      }
    }
  }
}

int main() {
  check_all<uint8_t>();
  check_all<uint16_t>();
  check_all<uint32_t>();
  std::printf("ok\n");
}
