"""Make every Python process with this folder in PYTHONPATH load all stored blocks, even if computing is cheaper."""

from octavo.core.transfer_cost import TransferCost

TransferCost.is_worth_loading = lambda *_: True  # type: ignore[method-assign]
