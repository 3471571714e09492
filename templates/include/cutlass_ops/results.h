// The types of a reduction's results, and where these go.

#pragma once

namespace cutlass_ops {

// The types of several results of the same values, and where these go.
template <class... Each>
struct Elements;

template <class First_, class... Rest>
struct Pointers {
  First_* first = nullptr;
  Pointers<Rest...> rest;
};
template <class Last>
struct Pointers<Last> {
  Last* first = nullptr;
};

template <class Element>
struct ResultsOf {
  using Type = Element*;
};
template <class... Each>
struct ResultsOf<Elements<Each...>> {
  using Type = Pointers<Each...>;
};

}  // namespace cutlass_ops
