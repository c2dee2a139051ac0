// The peer's part of sparse attention in a prompt's tiles: the last queries of each.
//
// Which rows those are follows from the program's size alone: a share of them, in whole blocks of
// 64. A row's selection and attention follow from its query and the cells it sees, so nobody sees
// who computed it. Both ops fork and join by themselves, for a call that is captured leaves nothing
// behind; the primary works on its own rows in between.
//
// To select, the peer copies its rows' queries and the pooled keys in use; to attend, the keys and
// values in use, of one layer at a time: each cell is read by many rows. Queries, gates and results
// stay in the primary's memory, where each is read or written once. The selected blocks of its rows
// stay on the peer.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/launch.h"
#include "cuda/ops/qsa_attend.h"
#include "cuda/ops/qsa_select.h"
#include "cuda/peer_branch.h"

namespace strata {

// What calls have at most.
struct PeerAttentionSizes {
  double share = 0.0;    // of a tile's rows
  int64_t max_rows = 0;  // of a tile or chunk
  int64_t num_cells = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t cell_bytes = 0;  // of a cell's key and value in all heads, without scales
  bool has_scales = false;
  int64_t index_heads = 0;
  int64_t index_dim = 0;
  int64_t num_groups = 0;  // of pooled keys
  int64_t ratio = 0;
  int64_t num_blocks = 0;

  // Of a program of so many; 0 where either side would have too few for the kernels of tiles.
  int64_t RowsOf(int64_t num_rows) const;
};

// Of the peer's memory.
int64_t PeerAttentionBytes(const PeerAttentionSizes& sizes);

class PeerAttention {
 public:
  // On `device`, which reaches the current one's memory, and is reached. Throws std::runtime_error.
  PeerAttention(int device, const PeerAttentionSizes& sizes);

  // Whether the peer takes rows of such a call.
  bool Takes(const QsaSelectArgs& args) const;
  bool Takes(const QsaAttendArgs& args) const;

  // The whole op, the peer's rows included. What `blocks` holds of those is undefined.
  std::string Select(QsaSelectArgs args, cudaStream_t stream);
  // Of the call whose blocks were selected last.
  std::string Attend(QsaAttendArgs args, cudaStream_t stream);

  void SetTimeline(const TimelineAt& timeline) { branch_.SetTimeline(timeline); }

 private:
  std::string SelectOnPeer(const QsaSelectArgs& args, int64_t first);
  std::string AttendOnPeer(const QsaAttendArgs& args, int64_t first);

  PeerAttentionSizes sizes_;
  PeerBranch branch_;
};

}  // namespace strata
