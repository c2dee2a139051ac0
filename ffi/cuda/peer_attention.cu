#include <algorithm>
#include <cmath>

#include "cuda/current_device.h"
#include "cuda/peer_attention.h"
#include "cuda/peer_pull.h"
#include "cuda/tile_rows.h"

namespace strata {
namespace {

constexpr int64_t kGrain = 64;
constexpr int64_t kIndexGroup = 16;  // blocks whose pooled keys lie side by side

// The parts of the peer's memory.
struct Layout {
  int64_t live, pos, queries, index_keys, blocks, scores, keys, values, scales, workspace, bytes;
  int64_t score_bytes, workspace_bytes;

  explicit Layout(const PeerAttentionSizes& s) {
    const int64_t rows = s.RowsOf(s.max_rows);
    score_bytes = QsaSelectWorkspace(rows, s.num_groups);
    workspace_bytes =
        QsaAttendWorkspace(rows, s.num_heads, s.head_dim, s.num_cells, s.num_blocks, s.ratio);
    int64_t at = 0;
    const auto take = [&at](int64_t size) {
      const int64_t begin = at;
      at += (size + 271) / 256 * 256;  // a pull may write 15 bytes behind the end
      return begin;
    };
    live = take(4);
    pos = take(4);
    queries = take(rows * s.index_heads * s.index_dim * 4);
    index_keys = take(s.num_groups * s.index_dim * kIndexGroup * 4);
    blocks = take(rows * s.num_blocks * 4);
    scores = take(score_bytes);
    keys = take(s.num_cells * s.cell_bytes / 2);
    values = take(s.num_cells * s.cell_bytes / 2);
    scales =
        take(s.has_scales ? s.num_cells * s.num_kv_heads * 2 * ScaleGroups(s.head_dim) * 4 : 0);
    workspace = take(workspace_bytes);
    bytes = at;
  }
};

}  // namespace

int64_t PeerAttentionSizes::RowsOf(int64_t num_rows) const {
  const auto rows =
      static_cast<int64_t>(std::floor(static_cast<double>(num_rows) * share / kGrain)) * kGrain;
  return std::min(rows, num_rows - rows) > kMostWindowRows ? rows : 0;
}

int64_t PeerAttentionBytes(const PeerAttentionSizes& sizes) { return Layout(sizes).bytes; }

PeerAttention::PeerAttention(int device, const PeerAttentionSizes& sizes)
    : sizes_(sizes), branch_("peer_attention", device, PeerAttentionBytes(sizes)) {}

bool PeerAttention::Takes(const QsaSelectArgs& a) const {
  return a.num_rows <= sizes_.max_rows && sizes_.RowsOf(a.num_rows) > 0 &&
         a.index_heads == sizes_.index_heads && a.index_dim == sizes_.index_dim &&
         a.num_groups <= sizes_.num_groups && a.ratio == sizes_.ratio &&
         a.num_blocks <= sizes_.num_blocks;
}

bool PeerAttention::Takes(const QsaAttendArgs& a) const {
  constexpr int64_t kValueBytes[] = {4, 2, 1};  // by CellType
  return a.num_rows <= sizes_.max_rows && sizes_.RowsOf(a.num_rows) > 0 &&
         a.num_cells <= sizes_.num_cells && a.num_heads == sizes_.num_heads &&
         a.num_kv_heads == sizes_.num_kv_heads && a.head_dim == sizes_.head_dim &&
         a.ratio == sizes_.ratio && a.num_blocks <= sizes_.num_blocks &&
         2 * a.num_kv_heads * a.head_dim * kValueBytes[static_cast<int>(a.cells.type)] ==
             sizes_.cell_bytes;
}

std::string PeerAttention::Select(QsaSelectArgs args, cudaStream_t stream) {
  const int64_t first = args.num_rows - sizes_.RowsOf(args.num_rows);
  std::string error = branch_.Fork(stream);
  if (error.empty()) error = SelectOnPeer(args, first);
  if (!error.empty()) return error;
  args.num_rows = static_cast<int>(first);
  args.rows_at_once = std::min(args.rows_at_once, args.num_rows);
  error = QsaSelect(args, stream);
  return error.empty() ? branch_.Join(stream) : error;
}

std::string PeerAttention::Attend(QsaAttendArgs args, cudaStream_t stream) {
  const int64_t first = args.num_rows - sizes_.RowsOf(args.num_rows);
  std::string error = branch_.Fork(stream);
  if (error.empty()) error = AttendOnPeer(args, first);
  if (!error.empty()) return error;
  args.num_rows = static_cast<int>(first);
  args.rows_at_once = std::min(args.rows_at_once, args.num_rows);
  error = QsaAttend(args, stream);
  return error.empty() ? branch_.Join(stream) : error;
}

std::string PeerAttention::SelectOnPeer(const QsaSelectArgs& args, int64_t first) {
  const CurrentDevice current(branch_.device());
  const Layout at(sizes_);
  unsigned char* const memory = branch_.memory();
  const int64_t row_bytes = sizes_.index_heads * sizes_.index_dim * 4;
  const PullNumbers numbers = {args.live,
                               args.pos,
                               args.num_rows,
                               first,
                               sizes_.num_cells,
                               reinterpret_cast<int32_t*>(memory + at.live),
                               reinterpret_cast<int32_t*>(memory + at.pos)};
  QsaSelectArgs own = args;
  own.index_q = reinterpret_cast<float*>(memory + at.queries);
  own.index_keys = reinterpret_cast<float*>(memory + at.index_keys);
  own.pos = numbers.peers_pos;
  own.live = numbers.peers_live;
  own.blocks = reinterpret_cast<int32_t*>(memory + at.blocks);
  own.scores = reinterpret_cast<uint32_t*>(memory + at.scores);
  own.num_rows = static_cast<int>(args.num_rows - first);
  own.rows_at_once = static_cast<int>(std::min<int64_t>(
      own.num_rows, at.score_bytes / (int64_t{args.num_groups} * kIndexGroup * 4)));
  const auto* queries = reinterpret_cast<const uint8_t*>(args.index_q) + first * row_bytes;
  const std::vector<PullPiece> pieces = {
      {queries, memory + at.queries, row_bytes, 1, PullCount::kRows},
      {args.index_keys, memory + at.index_keys, sizes_.index_dim * kIndexGroup * 4,
       kIndexGroup * sizes_.ratio, PullCount::kCells}};
  std::string error = branch_.Mark(PeerPhase::kAttentionIn);
  if (error.empty()) error = Pull(pieces, numbers, branch_.stream());
  if (error.empty()) error = branch_.Mark(PeerPhase::kSelect);
  if (error.empty()) error = QsaSelect(own, branch_.stream());
  return error.empty() ? branch_.End() : error;
}

std::string PeerAttention::AttendOnPeer(const QsaAttendArgs& args, int64_t first) {
  const CurrentDevice current(branch_.device());
  const Layout at(sizes_);
  unsigned char* const memory = branch_.memory();
  const PullNumbers numbers = {args.live,
                               args.pos,
                               args.num_rows,
                               first,
                               args.num_cells,
                               reinterpret_cast<int32_t*>(memory + at.live),
                               reinterpret_cast<int32_t*>(memory + at.pos)};
  QsaAttendArgs own = args;
  own.q = args.q + first * sizes_.num_heads * sizes_.head_dim;
  own.proj = args.proj + first * args.proj_stride;
  own.out = args.out + first * sizes_.num_heads * sizes_.head_dim;
  own.cells.keys = memory + at.keys;
  own.cells.values = memory + at.values;
  own.cells.scales = reinterpret_cast<float*>(memory + at.scales);
  own.blocks = reinterpret_cast<int32_t*>(memory + at.blocks);
  own.pos = numbers.peers_pos;
  own.live = numbers.peers_live;
  own.workspace = reinterpret_cast<float*>(memory + at.workspace);
  own.num_rows = static_cast<int>(args.num_rows - first);
  const int64_t row_floats = QsaAttendRowFloats(sizes_.num_heads, sizes_.head_dim, args.num_cells,
                                                args.num_blocks, sizes_.ratio);
  own.rows_at_once =
      static_cast<int>(std::min<int64_t>(own.num_rows, at.workspace_bytes / (4 * row_floats)));
  const auto cells = [](const void* from, void* to, int64_t bytes) {
    return PullPiece{from, to, bytes, 1, PullCount::kCells};
  };
  std::vector<PullPiece> pieces = {
      cells(args.cells.keys, own.cells.keys, sizes_.cell_bytes / 2),
      cells(args.cells.values, own.cells.values, sizes_.cell_bytes / 2)};
  if (sizes_.has_scales) {
    pieces.push_back(cells(args.cells.scales, own.cells.scales,
                           sizes_.num_kv_heads * 2 * ScaleGroups(sizes_.head_dim) * 4));
  }
  std::string error = branch_.Mark(PeerPhase::kAttentionIn);
  if (error.empty()) error = Pull(pieces, numbers, branch_.stream());
  if (error.empty()) error = branch_.Mark(PeerPhase::kAttend);
  if (error.empty()) error = QsaAttend(own, branch_.stream());
  return error.empty() ? branch_.End() : error;
}

}  // namespace strata
