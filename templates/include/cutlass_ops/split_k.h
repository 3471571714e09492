// A kernel whose thread blocks share one tile: each block of a cluster takes a part of K, and the parts are added up
// through distributed shared memory. For problems with few tiles and a long K.

#pragma once

#include "cutlass_ops/sm90_gemm.h"

namespace cutlass_ops {

// `Mainloop` names CUTLASS's collective (for its TMA descriptors and shared memory), `Epilogue` the collective epilogue of
// the part of a tile that one block finishes: all rows and 1 / kSplits of the columns.
template <class Mainloop, class Epilogue, int kWarpgroups, int kSplits>
class SplitKernel {
 public:
  using ProblemShape = cute::Shape<int, int, int, int>;
  using CollectiveMainloop = Mainloop;
  using CollectiveEpilogue = Epilogue;
  using TileShape = typename Mainloop::TileShape;
  using TiledMma = typename Mainloop::TiledMma;
  using StrideA = typename Mainloop::StrideA;
  using StrideB = typename Mainloop::StrideB;
  using StrideC = typename Epilogue::StrideC;
  using StrideD = typename Epilogue::StrideD;
  using TileScheduler = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90;
  struct DispatchPolicy {
    using ClusterShape = cute::Shape<cute::Int<kSplits>, cute::_1, cute::_1>;
  };

  static constexpr int kTileM = cute::size<0>(TileShape{});
  static constexpr int kTileN = cute::size<1>(TileShape{});
  static constexpr int kStages = Mainloop::DispatchPolicy::Stages;
  static constexpr int kConsumers = cute::size(TiledMma{});
  // How a block's part lies in the registers of its threads: as one narrower wgmma would leave it.
  using PartMma = decltype(cute::make_tiled_mma(
      Wgmma<kTileN / kSplits, typename Mainloop::ElementA, typename Mainloop::ElementB, cute::GMMA::Major::K,
            cute::GMMA::Major::K>{},
      cute::Layout<cute::Shape<cute::Int<kWarpgroups>, cute::_1, cute::_1>>{}));
  static_assert(kConsumers == 128 * kWarpgroups);
  static constexpr int kPart = kTileM * kTileN / kConsumers / kSplits;  // accumulators of a thread that one block finishes
  static constexpr uint32_t MaxThreadsPerBlock = 128 + kConsumers;
  static constexpr uint32_t MinBlocksPerMultiprocessor = 1;
  // A thread's accumulators are those of one wgmma after the other, and each has all of the tile's columns.
  static constexpr int kColumns = kTileN / 2, kSlice = kColumns / kSplits;
  static_assert(kSlice % 4 == 0, "parts are exchanged four values at a time");
  using PartShape = cute::Shape<cute::Int<kTileM>, cute::Int<kTileN / kSplits>, decltype(cute::get<2>(TileShape{}))>;

  struct SharedStorage {
    struct Barriers {
      alignas(16) cutlass::arch::ClusterTransactionBarrier full[kStages];
      alignas(16) cutlass::arch::ClusterBarrier empty[kStages];
      alignas(16) typename Epilogue::PipelineStorage epilogue;
      alignas(16) cutlass::arch::ClusterTransactionBarrier parts;
    } barriers;
    struct Tensors : cute::aligned_struct<128, cute::_1> {
      typename Epilogue::TensorStorage epilogue;
      typename Mainloop::TensorStorage mainloop;  // afterwards, what the blocks have for each other
    } tensors;
  };
  static constexpr int SharedStorageSize = sizeof(SharedStorage);
  // Of the buffer for operands: first this block's sums for each other one, then what the others sent.
  static constexpr uint32_t kSlotBytes = kPart * kConsumers * sizeof(float), kSlots = kSplits - 1;
  static_assert(2 * kSlots * kSlotBytes <= sizeof(typename Mainloop::TensorStorage),
                "the parts of a tile do not fit where its operands were");

  using Params = TileParams<ProblemShape, typename Mainloop::Params, typename Epilogue::Params>;

  CUTLASS_DEVICE void operator()(Params const& params, char* memory) {
    using namespace cute;
    auto& storage = *reinterpret_cast<SharedStorage*>(memory);
    int const warp = cutlass::canonical_warp_idx_sync();
    int const group = cutlass::canonical_warp_group_idx();
    int const rank = int(cute::block_rank_in_cluster());
    bool const loads = warp == 0, loads_c = warp == 2;

    if (loads && cute::elect_one_sync()) {
      Mainloop::prefetch_tma_descriptors(params.mainloop);
      Epilogue::prefetch_tma_descriptors(params.epilogue);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kStages; ++i) {
        storage.barriers.full[i].init(1);
        storage.barriers.empty[i].init(kConsumers / 128);
      }
      storage.barriers.parts.init(1);
      storage.barriers.parts.arrive_and_expect_tx(kSlots * kSlotBytes);
    }
    using LoadC = typename Epilogue::LoadPipeline;
    typename LoadC::Params load_c_params;
    if (loads_c) load_c_params.role = LoadC::ThreadCategory::Producer;
    if (group > 0) load_c_params.role = LoadC::ThreadCategory::Consumer;
    load_c_params.dst_blockid = uint32_t(rank);
    load_c_params.producer_arv_count = cutlass::NumThreadsPerWarp;
    load_c_params.consumer_arv_count = kConsumers;
    if constexpr (Epilogue::RequiresTransactionBytes) {
      load_c_params.transaction_bytes = params.epilogue.tma_transaction_bytes;
    }
    LoadC load_c(storage.barriers.epilogue, load_c_params);
    using StoreD = typename Epilogue::StorePipeline;
    typename StoreD::Params store_d_params;
    store_d_params.always_wait = true;
    StoreD store_d(store_d_params);
    cutlass::arch::fence_barrier_init();
    __syncthreads();

    auto const problem = params.problem_shape;
    int const steps = cute::ceil_div(get<2>(problem), int(size<2>(TileShape{})));
    int const begin = int(int64_t(steps) * rank / kSplits), end = int(int64_t(steps) * (rank + 1) / kSplits);
    auto const coord = make_coord(int(blockIdx.y), int(blockIdx.z) * kSplits + rank, _, 0);
    Epilogue epilogue(params.epilogue, storage.tensors.epilogue);

    if (group == 0) {
      cutlass::arch::warpgroup_reg_dealloc<40>();
      if (loads) load(params, storage, begin, end);
      __syncwarp();
      cluster_arrive_relaxed();
      cluster_wait();
      cluster_arrive_relaxed();
      if (loads_c && epilogue.is_producer_load_needed()) {
        cutlass::arch::wait_on_dependent_grids();
        auto state = cutlass::make_producer_start_state<LoadC>();
        state = epilogue.load(load_c, state, problem, PartShape{}, coord, PartMma{}, cutlass::canonical_lane_idx(),
                              storage.tensors.epilogue);
        epilogue.load_tail(load_c, state);
      }
      cluster_wait();
      return;
    }

    cutlass::arch::warpgroup_reg_alloc<232>();
    int const thread = int(threadIdx.x) - 128;
    auto sums = partition_fragment_C(TiledMma{}, take<0, 2>(TileShape{}));
    multiply(storage, sums, thread, end - begin);
    cutlass::arch::launch_dependent_grids();
    auto part = partition_fragment_C(PartMma{}, take<0, 2>(PartShape{}));
    static_assert(decltype(size(part))::value == kPart);
    add_up(storage, sums, part, thread, rank);

    typename Epilogue::LoadPipelineState load_state;
    auto store_state = cutlass::make_producer_start_state<StoreD>();
    auto [loaded, stored] = epilogue.store(load_c, load_state, store_d, store_state, problem, PartShape{}, coord, part,
                                           PartMma{}, thread, storage.tensors.epilogue);
    epilogue.store_tail(load_c, loaded, store_d, stored);
    cluster_wait();  // what this block sent was read from its memory
  }

 private:
  using State = cutlass::PipelineState<kStages>;

  // One thread fills stage after stage.
  CUTLASS_DEVICE static void load(Params const& params, SharedStorage& storage, int begin, int end) {
    using namespace cute;
    cutlass::arch::wait_on_dependent_grids();
    if (!cute::elect_one_sync()) return;
    auto const fill = Mainloop::filler(params.mainloop, Origin{}, make_coord(int(blockIdx.y), int(blockIdx.z)), 0,
                                       storage.tensors.mainloop);
    State state{0, 1, 0};  // all stages are empty
    CUTLASS_PRAGMA_NO_UNROLL
    for (int k = begin; k < end; ++k, ++state) {
      int const stage = state.index();
      storage.barriers.empty[stage].wait(state.phase());
      auto& full = storage.barriers.full[stage];
      full.arrive_and_expect_tx(Mainloop::TmaTransactionBytes);
      fill(reinterpret_cast<uint64_t&>(full), k, stage);
    }
  }

  // A warpgroup's products over this block's part of K.
  template <class Sums>
  CUTLASS_DEVICE static void multiply(SharedStorage& storage, Sums& sums, int thread, int steps) {
    using namespace cute;
    auto const add_product = Mainloop::multiplier(storage.tensors.mainloop, thread);
    if (steps == 0) {
      clear(sums);
      return;
    }
    bool const signals = thread % 128 == 0;
    State state, release;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = 0; step < steps; ++step, ++state) {
      int const stage = state.index();
      storage.barriers.full[stage].wait(state.phase());
      warpgroup_fence_operand(sums);
      warpgroup_arrive();
      add_product(sums, stage, step == 0);
      warpgroup_commit_batch();
      if (step > 0) {
        warpgroup_wait<1>();  // the step before: its stage is free
        if (signals) storage.barriers.empty[release.index()].arrive();
        ++release;
      }
      warpgroup_fence_operand(sums);
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(sums);
  }

  // Which accumulator is the i-th of the part that block `to` finishes.
  CUTLASS_DEVICE static constexpr int accumulator(int to, int i) {
    return i / kSlice * kColumns + to * kSlice + i % kSlice;
  }

  // Sends the parts that other blocks finish to them, and adds theirs to the own one, always in the same order. Whole parts
  // go by bulk copy: stores of single threads to another block's memory are slower. Blocks meet without ordering memory,
  // which would cost a microsecond. That is enough: before they meet they only read, and what they read has arrived.
  template <class Sums, class Part>
  CUTLASS_DEVICE static void add_up(SharedStorage& storage, Sums const& sums, Part& part, int thread, int rank) {
    auto* const outgoing = reinterpret_cast<float4*>(&storage.tensors.mainloop) + thread;
    auto* const incoming = outgoing + kSlots * kSlotBytes / sizeof(float4);
    auto const value = [&](int slot, int i) { return (slot * (kPart / 4) + i / 4) * kConsumers; };
    cutlass::arch::NamedBarrier::sync(kConsumers, 0);
    cute::cluster_arrive_relaxed();  // this block reads no operands any more
    CUTLASS_PRAGMA_UNROLL
    for (int to = 0; to < kSplits; ++to) {
      int const slot = to < rank ? to : to - 1;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPart; i += 4) {
        if (to == rank) {
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < 4; ++j) part(i + j) = sums(accumulator(to, i + j));
        } else {
          outgoing[value(slot, i)] = make_float4(sums(accumulator(to, i)), sums(accumulator(to, i + 1)),
                                                 sums(accumulator(to, i + 2)), sums(accumulator(to, i + 3)));
        }
      }
    }
    cutlass::arch::fence_view_async_shared();
    cutlass::arch::NamedBarrier::sync(kConsumers, 0);
    cute::cluster_wait();
    // Each begins with its neighbour, so that no block's memory is written by all others at once.
    if (thread < kSlots) send(storage, rank, (rank + 1 + thread) % kSplits);
    storage.barriers.parts.wait(0);
    cute::cluster_arrive_relaxed();  // whatever was sent to this block has arrived
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kPart; i += 4) {
      float4 total = make_float4(0, 0, 0, 0);
      CUTLASS_PRAGMA_UNROLL
      for (int from = 0; from < kSplits; ++from) {
        float4 const term = from == rank ? make_float4(part(i), part(i + 1), part(i + 2), part(i + 3))
                                         : incoming[value(from < rank ? from : from - 1, i)];
        total.x += term.x;
        total.y += term.y;
        total.z += term.z;
        total.w += term.w;
      }
      part(i) = total.x;
      part(i + 1) = total.y;
      part(i + 2) = total.z;
      part(i + 3) = total.w;
    }
  }

  CUTLASS_DEVICE static void send(SharedStorage& storage, int rank, int to) {
    uint32_t const base = cute::cast_smem_ptr_to_uint(&storage.tensors.mainloop);
    uint32_t const from = base + (to < rank ? to : to - 1) * kSlotBytes;
    uint32_t const there = there_of(base + (kSlots + (rank < to ? rank : rank - 1)) * kSlotBytes, to);
    uint32_t const barrier = there_of(cute::cast_smem_ptr_to_uint(&storage.barriers.parts), to);
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(there),
        "r"(from), "r"(kSlotBytes), "r"(barrier)
        : "memory");
  }

  // An address of this block's shared memory, as it is in another block of the cluster.
  CUTLASS_DEVICE static uint32_t there_of(uint32_t address, int block) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
    return there;
  }
};

}  // namespace cutlass_ops
