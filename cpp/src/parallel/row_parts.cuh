// A thread's share of a row that ranks have parts of.
#pragma once

#include "parallel/peers.cuh"
#include "rows/pass.cuh"

namespace octofuse::peers {

using rows::kPack;
using rows::Pack;

// Packs first + i * stride of a row, for i below kPacks.
template <class T, int kPacks>
class RowParts {
 public:
  // Whose they are; nothing is read that an earlier kernel writes.
  __device__ RowParts(const GatherRowsArgs& args, int row, int first, int stride) : args_(args) {
    const int count = static_cast<int>(args.rows.cols) / kPack;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int index = first + i * stride;
      rank_[i] = index < count ? 0 : kNobody;
      int own = index;
      if (!args.adds && index < count) {
        while (own >= packs_of(rank_[i])) own -= packs_of(rank_[i]++);
      }
      own_[i] = own;
      at_[i] = index < count ? row * (args.adds ? count : packs_of(rank_[i])) + own : 0;
    }
  }

  // Sends this rank's packs, own(i) of its part of the row, and waits for the others'. The caller's packs: the whole
  // row's, or the sum's.
  template <class Own>
  __device__ void exchange(const Call& call, Own own, Pack<T> (&packs)[kPacks]) const {
    if (args_.adds) return add(call, own, packs);
    const int rank = call.peers.rank;
    const Line* from[2 * kPacks];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const bool awaits = rank_[i] != kNobody && rank_[i] != rank;
      if (rank_[i] == rank) send(call, i, packs[i] = own(own_[i]));
      from[2 * i] = awaits ? call.inbox(rank, rank_[i]) + 2 * at_[i] : nullptr;
      from[2 * i + 1] = awaits ? from[2 * i] + 1 : nullptr;
    }
    uint2 units[2 * kPacks];
    call.await_all(from, units);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (from[2 * i] != nullptr) packs[i] = pack_of(units[2 * i], units[2 * i + 1]);
    }
  }

 private:
  static constexpr int kNobody = -1;

  __device__ int packs_of(int rank) const { return args_.cols[rank] / kPack; }

  __device__ static Pack<T> pack_of(uint2 low, uint2 high) {
    Pack<T> pack;
    reinterpret_cast<uint4&>(pack) = {low.x, low.y, high.x, high.y};
    return pack;
  }

  __device__ void send(const Call& call, int i, const Pack<T>& pack) const {
    const auto& bits = reinterpret_cast<const uint4&>(pack);
    call.send_to_all(2 * at_[i], {bits.x, bits.y});
    call.send_to_all(2 * at_[i] + 1, {bits.z, bits.w});
  }

  template <class Own>
  __device__ void add(const Call& call, Own own, Pack<T> (&packs)[kPacks]) const {
    const int rank = call.peers.rank;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (rank_[i] != kNobody) send(call, i, packs[i] = own(own_[i]));
    }
    Pack<float> sums[kPacks] = {};
    for (int r = 0; r < call.peers.ranks; ++r) {
      const Line* from[2 * kPacks];
      uint2 units[2 * kPacks];
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        const bool awaits = rank_[i] != kNobody && r != rank;
        from[2 * i] = awaits ? call.inbox(rank, r) + 2 * at_[i] : nullptr;
        from[2 * i + 1] = awaits ? from[2 * i] + 1 : nullptr;
      }
      call.await_all(from, units);
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        const Pack<T> part = r == rank ? packs[i] : pack_of(units[2 * i], units[2 * i + 1]);
#pragma unroll
        for (int j = 0; j < kPack; ++j) sums[i].values[j] = __fadd_rn(sums[i].values[j], to_float(part.values[j]));
      }
    }
#pragma unroll
    for (int i = 0; i < kPacks; ++i) packs[i] = rows::narrow<T>(sums[i]);
  }

  const GatherRowsArgs& args_;
  int rank_[kPacks], own_[kPacks], at_[kPacks];
};

// This rank's part of a row, pack by pack; kGates: where the call says so, the products of its gates and values.
template <class T, bool kGates>
struct OwnPart {
  const Pack<T>* row;
  int packs;  // of gates, before as many of values; 0: there are none
  Activation activation;

  __device__ OwnPart(const GatherRowsArgs& args, int64_t index)
      : row(reinterpret_cast<const Pack<T>*>(static_cast<const T*>(args.rows.x) + index * args.rows.ldx)),
        packs(args.rows.gated ? args.cols[args.peers.rank] / kPack : 0),
        activation(args.rows.activation) {}
  __device__ Pack<T> operator()(int index) const {
    if (!kGates || packs == 0) return row[index];
    return rows::gated_by(row[index], row[packs + index], activation);
  }
};

}  // namespace octofuse::peers
