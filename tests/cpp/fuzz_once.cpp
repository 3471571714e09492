// What libFuzzer does with the harness, without it: each file once, and as many times changed.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(uint8_t const* data, size_t size);
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t most, unsigned seed);

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t) {
  if (size > 0) data[size / 2] ^= 1;
  return size;
}

// How many changes of each file, and the files.
int main(int count, char** words) {
  for (int at = 2; at < count; ++at) {
    std::ifstream file(words[at], std::ios::binary);
    std::vector<uint8_t> const good{std::istreambuf_iterator<char>(file), {}};
    LLVMFuzzerTestOneInput(good.data(), good.size());
    for (int seed = 0; seed < std::atoi(words[1]); ++seed) {
      std::vector<uint8_t> changed = good;
      changed.resize(good.size() + 4096);
      changed.resize(LLVMFuzzerCustomMutator(changed.data(), good.size(), changed.size(), unsigned(seed)));
      LLVMFuzzerTestOneInput(changed.data(), changed.size());
    }
  }
  std::printf("%d files\n", count - 2);
}
