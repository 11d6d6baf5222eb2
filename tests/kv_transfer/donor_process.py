"""A prefill engine without a model: transfers its first blocks, and never finishes the other ones."""

import json
import sys
import time

from octavo.data.kv_transfer_params import KVTransferParams
from octavo.data.request import Request
from octavo.kv_transfer.direct_donor import DirectDonor
from octavo.sampling_params import SamplingParams

if __name__ == "__main__":
    num_blocks, block_bytes = int(sys.argv[1]), int(sys.argv[2])
    donor = DirectDonor(block_bytes, 64 * block_bytes, protocol="tcp", secret="s", kv_format=json.loads(sys.argv[3]))
    donor.request_added(Request("p", [1], SamplingParams(), kv_transfer_params=KVTransferParams("t", is_prefill=True)))
    keys = [bytes([index]) * 32 for index in range(num_blocks)]
    donor.save(keys, [memoryview(key[:1] * block_bytes) for key in keys])
    while donor._client.get("127.0.0.1", 20) is None:
        pass
    sys.stdout.write(f"{donor.port}\n")
    sys.stdout.flush()
    time.sleep(600)
