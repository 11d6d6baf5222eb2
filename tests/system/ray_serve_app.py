"""Serve two octavo replicas with Ray Serve LLM until SIGTERM: `ray_serve_app.py PORT FOLDER`. Run by tests."""

from __future__ import annotations

import signal
import sys
import threading

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app


def main(port: int, folder: str) -> None:
    """Start a cluster of one node, and serve."""
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20, _temp_dir=folder)
    config = LLMConfig(
        model_loading_config={"model_id": "octavo-demo"},
        server_cls="octavo.ray.serve:OctavoServer",
        engine_kwargs={"num_threads": 1, "num_gpu_blocks_override": 800, "max_num_seqs": 16, "seed": 3},
        deployment_config={"num_replicas": 2, "health_check_period_s": 1},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build_openai_app({"llm_configs": [config]}))
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    ended.wait()
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
