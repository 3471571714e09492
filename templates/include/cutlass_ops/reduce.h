// What each reduction does with values: the state that it keeps, the state of no elements, that of one element at a place
// along the reduced row or column, and how two states join.

#pragma once

#include "cutlass_ops/epilogue_math.h"
#include "cutlass_ops/results.h"

namespace cutlass_ops {

#if defined(__CUDACC__)

// What another lane keeps, and what another thread block has left. Those of two numbers have overloads (reductions.h).
CUTLASS_DEVICE float shuffle_xor(float x, int lanes) { return __shfl_xor_sync(0xffffffff, x, lanes); }
CUTLASS_DEVICE float load_part(float const* at) { return __ldcg(at); }

#endif

namespace reduce {

struct Sum {
  using State = float;
  CUTLASS_DEVICE static float identity() { return 0.0f; }
  CUTLASS_DEVICE static float lift(float x, int) { return x; }
  CUTLASS_DEVICE static float combine(float x, float y) { return x + y; }
};

struct SumSquare : Sum {
  CUTLASS_DEVICE static float lift(float x, int) { return x * x; }
};

// NaN wins, as in torch.amax.
struct Max {
  using State = float;
  CUTLASS_DEVICE static float identity() { return -infinity(); }
  CUTLASS_DEVICE static float lift(float x, int) { return x; }
  CUTLASS_DEVICE static float combine(float x, float y) { return maximum(x, y); }
};

}  // namespace reduce

// The state of several elements of one result, from their values, their growing places along the row or column, and whether
// they are there at all. A reduction with two numbers does it in its own way.
template <class Reduce, int kCount>
CUTLASS_DEVICE typename Reduce::State fold(float const (&x)[kCount], int const (&at)[kCount], bool const (&there)[kCount]) {
  if constexpr (sizeof(typename Reduce::State) > sizeof(float)) {
    return Reduce::fold(x, at, there);
  } else {
    float kept = there[0] ? Reduce::lift(x[0], at[0]) : Reduce::identity();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 1; i < kCount; ++i) {
      kept = Reduce::combine(kept, there[i] ? Reduce::lift(x[i], at[i]) : Reduce::identity());
    }
    return kept;
  }
}

// ---- Several reductions of the same values ---------------------------------------------------------------------------
//
// They leave one part for all of them, count its arrival once, and are joined at once.

template <class First_, class... Rest>
struct States {
  First_ first;
  States<Rest...> rest;
};
template <class Last>
struct States<Last> {
  Last first;
};

#if defined(__CUDACC__)

template <class Last>
CUTLASS_DEVICE States<Last> shuffle_xor(States<Last> const& x, int lanes) {
  return {shuffle_xor(x.first, lanes)};
}
template <class First, class Second, class... Rest>
CUTLASS_DEVICE States<First, Second, Rest...> shuffle_xor(States<First, Second, Rest...> const& x, int lanes) {
  return {shuffle_xor(x.first, lanes), shuffle_xor(x.rest, lanes)};
}

template <class Last>
CUTLASS_DEVICE States<Last> load_part(States<Last> const* at) {
  return {load_part(&at->first)};
}
template <class First, class Second, class... Rest>
CUTLASS_DEVICE States<First, Second, Rest...> load_part(States<First, Second, Rest...> const* at) {
  return {load_part(&at->first), load_part(&at->rest)};
}

#endif

namespace reduce {

template <class First_, class... Rest>
struct Together {
  using First = First_;
  using Next = Together<Rest...>;
  using State = States<typename First::State, typename Rest::State...>;
  CUTLASS_DEVICE static State identity() { return {First::identity(), Next::identity()}; }
  CUTLASS_DEVICE static State combine(State const& x, State const& y) {
    return {First::combine(x.first, y.first), Next::combine(x.rest, y.rest)};
  }
  template <int kCount>
  CUTLASS_DEVICE static State fold(float const (&x)[kCount], int const (&at)[kCount], bool const (&there)[kCount]) {
    return {cutlass_ops::fold<First>(x, at, there), Next::fold(x, at, there)};
  }
};
template <class Last>
struct Together<Last> {
  using First = Last;
  using State = States<typename Last::State>;
  CUTLASS_DEVICE static State identity() { return {Last::identity()}; }
  CUTLASS_DEVICE static State combine(State const& x, State const& y) { return {Last::combine(x.first, y.first)}; }
  template <int kCount>
  CUTLASS_DEVICE static State fold(float const (&x)[kCount], int const (&at)[kCount], bool const (&there)[kCount]) {
    return {cutlass_ops::fold<Last>(x, at, there)};
  }
};

}  // namespace reduce

// What is stored of what a reduction has kept.
template <class Reduce, class Element>
CUTLASS_DEVICE Element result_of(typename Reduce::State const& kept) {
  if constexpr (cutlass::platform::is_same<typename Reduce::State, float>::value) {
    return Element(kept);
  } else {
    return Element(Reduce::result(kept));
  }
}

template <class Reduce, class Element>
CUTLASS_DEVICE void put(Element* results, int at, typename Reduce::State const& kept) {
  results[at] = result_of<Reduce, Element>(kept);
}
template <class Reduce, class Last>
CUTLASS_DEVICE void put(Pointers<Last> const& results, int at, typename Reduce::State const& kept) {
  put<typename Reduce::First>(results.first, at, kept.first);
}
template <class Reduce, class First, class Second, class... Rest>
CUTLASS_DEVICE void put(Pointers<First, Second, Rest...> const& results, int at, typename Reduce::State const& kept) {
  put<typename Reduce::First>(results.first, at, kept.first);
  put<typename Reduce::Next>(results.rest, at, kept.rest);
}

}  // namespace cutlass_ops
