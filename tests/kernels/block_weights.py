"""Random weights in blocks of every kind."""

import torch

from octavo.kernels.block_weight import BlockKind, BlockWeight

# Where the float16 numbers of a block stand: what random bytes would make NaN of.
_FLOAT16_PLACES = {
    BlockKind.Q8_0: (0,),
    BlockKind.Q4_0: (0,),
    BlockKind.Q4_1: (0, 2),
    BlockKind.Q5_0: (0,),
    BlockKind.Q5_1: (0, 2),
    BlockKind.Q4_K: (0, 2),
    BlockKind.Q5_K: (0, 2),
    BlockKind.Q6_K: (208,),
    BlockKind.MXFP4: (),
}


def random_blocks(generator, kind, out_features, in_features):
    """Return a weight whose integers are any, and whose scales are of usual size."""
    num_blocks = out_features * in_features // kind.block_values
    blocks = torch.randint(0, 256, (num_blocks, kind.block_bytes), generator=generator, dtype=torch.uint8)
    for place in _FLOAT16_PLACES[kind]:
        scales = torch.randn(num_blocks, 1, generator=generator).half() * 0.01
        blocks[:, place : place + 2] = scales.view(torch.uint8)
    if kind is BlockKind.MXFP4:
        blocks[:, 0] = torch.randint(110, 130, (num_blocks,), generator=generator, dtype=torch.uint8)
    return BlockWeight(kind, blocks.view(out_features, -1), in_features)
