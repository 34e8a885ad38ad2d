"""Ray Serve LLM's quick start for prefill and decode apart; an environment with Ray runs it.

The head node has all prefill replicas, and another node decode. The argument is JSON: model, name,
dtype, port, metrics_ports of both nodes, num_prefill, transfer. It ends on SIGTERM.
"""

import json
import signal
import sys
import threading
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.llm import LLMConfig, build_pd_openai_app


def config_of(settings: dict[str, Any], role: str, num_replicas: int) -> LLMConfig:
    """Replicas on a core each, on the node that has the resource of this name."""
    return LLMConfig(
        model_loading_config={"model_id": settings["name"], "model_source": settings["model"]},
        engine_kwargs={
            "dtype": settings["dtype"],
            "enforce_eager": True,
            "kv_transfer_config": dict(settings["transfer"]),
        },
        placement_group_config={"bundles": [{"CPU": 1, role: 1}]},
        deployment_config={"num_replicas": num_replicas, "ray_actor_options": {"num_cpus": 1}},
        log_engine_metrics=True,
    )


settings = json.loads(sys.argv[1])
over = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: over.set())
head, other = (
    {"num_cpus": 8, "resources": {role: 8}, "metrics_export_port": port}
    for role, port in zip(("prefill", "decode"), settings["metrics_ports"], strict=True)
)
nodes = Cluster(initialize_head=True, head_node_args={**head, "include_dashboard": False})
nodes.add_node(**other)
ray.init(address=nodes.address)
try:
    serve.start(http_options={"host": "127.0.0.1", "port": settings["port"]})
    prefill = config_of(settings, "prefill", settings["num_prefill"])
    decode = config_of(settings, "decode", 1)
    serve.run(build_pd_openai_app({"prefill_config": prefill, "decode_config": decode}))
    print("platform is up", flush=True)
    over.wait()
finally:
    serve.shutdown()
    ray.shutdown()
    nodes.shutdown()
