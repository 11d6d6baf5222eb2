"""For each Python process that has this folder in PYTHONPATH: what a store has is loaded, whether that pays or not."""

from octavo.core.transfer_cost import TransferCost

TransferCost.is_worth_loading = lambda *_: True  # type: ignore[method-assign]
