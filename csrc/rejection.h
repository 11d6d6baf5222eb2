// Acceptance of drafts: the longest prefix of drafts that equals the target's choices, then one more choice of the target.
#pragma once

#include <cstdint>

namespace octavo {

// target, draft_ids [num_logits]: the choice and the input token of each row; a draft is one row after the choice that it guesses.
// cu_num_logits [num_requests + 1]. sampled [num_requests, num_steps + 1], num_sampled [num_requests].
// Returns false, and writes nothing, unless every request has one to num_steps + 1 rows.
inline bool accept_drafts(const int64_t* target, const int64_t* draft_ids, const int32_t* cu_num_logits, int64_t num_requests,
                          int64_t num_steps, int64_t* sampled, int32_t* num_sampled) {
  for (int64_t request = 0; request < num_requests; ++request) {
    const int64_t rows = cu_num_logits[request + 1] - cu_num_logits[request];
    if (rows < 1 || rows > num_steps + 1) return false;
  }
  for (int64_t request = 0; request < num_requests; ++request) {
    const int64_t first = cu_num_logits[request], last = cu_num_logits[request + 1] - 1;
    int64_t* out = sampled + request * (num_steps + 1);
    int64_t row = first;
    while (row < last && target[row] == draft_ids[row + 1]) ++row;
    const int64_t count = row - first + 1;
    for (int64_t i = 0; i <= num_steps; ++i) out[i] = i < count ? target[first + i] : -1;
    num_sampled[request] = static_cast<int32_t>(count);
  }
  return true;
}

}  // namespace octavo
