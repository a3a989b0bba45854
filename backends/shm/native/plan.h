// The plan of one layer as one rank sees it: the native image of ubep.protocol.plan, made from it in Python.
#pragma once
#include <cstdint>
#include <vector>

#include "rows.h"

namespace ubep {

constexpr int kHeaderWords = 4;  // status, records, base, tag
constexpr int kHeaderFlag = 0;   // index of an announcement's flag; those of the sending workers follow
enum HeaderStatus : int32_t { kOk = 0, kRefused = 1 };

struct Record {
    int64_t row_bytes = 0, scale_offset = 0, meta_offset = 0, nbytes = 0;
    int scales = 0, meta_words = 0;
};

struct Plan {
    int world = 1, rank = 0, experts = 0, hidden = 0, topk = 0, max_tokens = 0;
    Dtype dtype = Dtype::bf16;
    Quantisation quantise = Quantisation::none;
    bool per_rank = false, deduplicate = false, direct = false, weighted = true, checked = true;
    bool counts_everywhere = false, drop = false, size_aware = false;
    int64_t alignment = 1, capacity = -1;
    int entries = 1, workers = 1, counting = 1, sending = 1;
    int64_t max_records = 0, max_rows = 0;

    Record dispatch, combine;
    int64_t list_bytes = 0;

    // Window layout; see ubep.protocol.window.
    int64_t parity_bytes = 0, flag_block = 0, headers = 0, header_bytes = 0;
    int64_t slots = 0, slot_stride = 0, rows = 0, lists = 0;

    std::vector<int> send_order, receive_order, peers;   // of ranks
    std::vector<int64_t> chunk_to, chunk_from;           // records in a chunk, by peer
    int64_t smallest_chunk = 1;                          // of any tier
    std::vector<int> tier;                               // of each peer
    std::vector<int> owner, local_index, place, items;   // of experts; place: in the sending order by owner
    std::vector<int> local_experts, local_start;         // experts of rank r: [local_start[r], local_start[r + 1])

    int meta_words() const { return 1 + 3 * entries; }
    int row_entries() const { return per_rank ? 1 : entries; }
    int groups(int of) const { return per_rank ? 1 : local_start[of + 1] - local_start[of]; }
    int counted() const { return per_rank ? world : experts; }       // columns of the full counts
    int heard_counts() const { return counts_everywhere ? counted() : groups(rank); }
    // Column of group g of a rank in the full counts.
    int column(int of, int g) const { return per_rank ? of : local_experts[local_start[of] + g]; }
    int64_t row_bytes() const { return int64_t{hidden} * dtype_bytes(dtype); }

    int64_t flag(int parity, int source, int index) const {
        return parity * parity_bytes + source * flag_block + index * 8;
    }
    int64_t header(int parity, int source) const {
        return parity * parity_bytes + headers + source * header_bytes;
    }
    int64_t slot(int parity, int source) const { return parity * parity_bytes + slots + source * slot_stride; }
    int64_t rows_at(int parity) const { return parity * parity_bytes + rows; }
    int64_t lists_at(int parity) const { return parity * parity_bytes + lists; }
};

}  // namespace ubep
