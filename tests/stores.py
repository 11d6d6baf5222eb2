"""KV stores for tests of the core: their answers are given, and no bytes move."""

from __future__ import annotations


class Store:
    """Offers the first `num_tokens` of requests whose id begins with `prefix`, and records its calls.

    num_tokens None: the answer comes later. wants: whether it saves offered blocks.
    """

    name = "a store"

    def __init__(self, num_tokens=8, prefix="", *, wants=False):
        self.num_tokens = num_tokens
        self.prefix = prefix
        self.wants = wants
        self.told = []

    def request_added(self, request):
        self.told.append(("added", request.request_id))

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.told.append(("asked", request.request_id, num_computed_tokens))
        if not request.request_id.startswith(self.prefix):
            return 0
        return None if self.num_tokens is None else max(self.num_tokens - num_computed_tokens, 0)

    def lookup_given_up(self, request):
        self.told.append(("given up", request.request_id))

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        self.told.append(("allocated", request.request_id, list(block_ids), num_external_tokens))

    def keys_to_save(self, keys, *, only_first_group=False):
        self.told.append(("offered", list(keys)))
        return set(keys) if self.wants else set()

    def transfer_ordered(self, transfer):
        self.told.append(("ordered", transfer.transfer_id))

    def transfer_ended(self, transfer, num_blocks):
        self.told.append(("ended", transfer.transfer_id, num_blocks))

    def request_finished(self, request, block_ids):
        self.told.append(("finished", request.request_id, block_ids))
