// How sums that are whole numbers of 32 bits pass through shared memory in CUTLASS's 2.x epilogue. The visitors convert and store.

#pragma once

#include <cstdint>
#include <type_traits>

#include "cutlass/epilogue/threadblock/default_epilogue_tensor_op.h"

namespace cutlass_ops {
namespace sm80 {

// The output type by which CUTLASS chooses that way: it has D's size.
template <class Element>
using ExchangeInteger =
    std::conditional_t<sizeof(Element) == 1, int8_t, std::conditional_t<sizeof(Element) == 2, int16_t, float>>;

}  // namespace sm80
}  // namespace cutlass_ops

// CUTLASS has this way for FP32 results of any access, and for those of 8 and 16 bits only others, of whole accesses.
template <int kAccess, class Threadblock, class Warp, class Instruction, class ThreadMap>
struct cutlass::epilogue::threadblock::detail::DefaultIteratorsTensorOp<int8_t, int32_t, kAccess, Threadblock, Warp,
                                                                        Instruction, ThreadMap>
    : DefaultIteratorsTensorOp<float, int32_t, kAccess, Threadblock, Warp, Instruction, ThreadMap> {};
template <int kAccess, class Threadblock, class Warp, class Instruction, class ThreadMap>
struct cutlass::epilogue::threadblock::detail::DefaultIteratorsTensorOp<int16_t, int32_t, kAccess, Threadblock, Warp,
                                                                        Instruction, ThreadMap>
    : DefaultIteratorsTensorOp<float, int32_t, kAccess, Threadblock, Warp, Instruction, ThreadMap> {};
