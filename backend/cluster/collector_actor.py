"""The Ray actor of one collector. It imports nothing heavy, so that the driver stays light."""

import traceback

from slipstream.backend.cluster.trainer_actor import redirect_output
from slipstream.backend.monitor.trace_log import TraceLog
from slipstream.configs.schema import RunConfig
from slipstream.rollout.collection.collector.spec import CollectorSpec


class CollectorActor:
    """Runs one life of a collector in its process."""

    async def collect(self, spec: CollectorSpec, config: RunConfig) -> None:
        """Collect until the driver ends the connection."""
        redirect_output(spec.logs / f"{spec.collector}.log")
        from slipstream.rollout.collection.collector.collector_process import collect
        from slipstream.rollout.engine.request_trace import RequestTrace

        trace = TraceLog(config.run.folder, spec.collector)

        def trace_request(request: RequestTrace) -> None:
            trace.write("request", **vars(request))

        try:
            await collect(spec, config, trace_request)
        except Exception:
            traceback.print_exc()
            raise
        finally:
            trace.close()
