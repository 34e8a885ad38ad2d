"""Runs before the connector exists: registers its name, and checks a start before the weights load.

`register` is the `vllm.general_plugins` entry point, so that `"kv_connector": "NixlKVConnector"`
alone is enough. vLLM runs it in every process of every start, used or not, and an exception would
end that start. If vLLM loads no plugins, `nixl_kv.connector` runs it.

`CHECKS` lists the checks of a start. An API server runs those that it can, as soon as it has vLLM's
configuration; so their error comes within seconds, and last. An engine runs all. If a start fails
later, the API server prints the cause again when it exits, behind vLLM's own lines.
"""

import atexit
import copy
import enum
import errno
import functools
import itertools
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from nixl_kv import addresses
from nixl_kv.config import DYNAMO_VARIABLE, Config, own_transfers
from nixl_kv.connector import unpromised
from nixl_kv.connector.own import answers_early, has_ours, without_host
from nixl_kv.errors import ConfigError, NixlKVError, TicketRefused, get_logger, printable

logger = get_logger(__name__)

MAX_SHOWN: Final = 300  # characters of a bad value in an error

EXECUTORS: Final = "vllm.v1.executor.abstract"
ARGUMENTS: Final = "vllm.engine.arg_utils"

CAUSE_FILE: Final = "NIXL_KV_CAUSE_FILE"
"""Names the file where the processes of an engine leave the cause of a failed start."""

# An engine does not start, because another process still has its port. The processes of a killed
# engine end within two seconds, and its successor may start at once.
PORT_WAIT_S: Final = 10.0
# A starting engine tries its port again.
PORT_RETRY_S: Final = 0.1


def register() -> None:
    """Tell vLLM's factory where `NixlKVConnector` is. May be called again."""
    if "dynamo" in sys.modules:
        os.environ[DYNAMO_VARIABLE] = "1"
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
            KVConnectorFactory,
        )

        if "NixlKVConnector" not in KVConnectorFactory._registry:  # noqa: SLF001 - no other way
            KVConnectorFactory.register_connector(
                "NixlKVConnector", "nixl_kv.connector", "NixlKVConnector"
            )
        # A spawned engine process has loaded the executors by now. A forked one inherits the
        # wrapper, because its parent has looked the connector up.
        if EXECUTORS in sys.modules:
            check_before_weights(sys.modules[EXECUTORS].Executor)
        if ARGUMENTS in sys.modules:
            check_with_arguments(sys.modules[ARGUMENTS].EngineArgs)
    except (ImportError, AttributeError, TypeError, ValueError):
        logger.warning("vLLM's factory did not accept the name NixlKVConnector", exc_info=True)


def port_of(config: Config, vllm_config: Any) -> int:
    """The port to serve the description on, one per data-parallel engine; 0 means any free port."""
    index: int = vllm_config.parallel_config.data_parallel_index
    return config.port and config.port + index


def may_move(config: Config, *, is_prefill: bool) -> bool:
    """Whether another port would do: no ticket names it, and the operator did not choose it."""
    return not is_prefill and not config.port_name


def check_address(config: Config, vllm_config: Any, *, is_prefill: bool) -> None:
    """Check that the scheduler will be able to listen; waits up to PORT_WAIT_S for its port."""
    port = port_of(config, vllm_config)
    until = time.monotonic() + PORT_WAIT_S
    for attempt in itertools.count():
        try:
            addresses.try_bind(config.host, 0 if may_move(config, is_prefill=is_prefill) else port)
            break
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= until:
                raise _cannot_listen(config, port, error) from error
        if attempt == 0:
            logger.warning("port %d is in use; waiting for up to %g s", port, PORT_WAIT_S)
        time.sleep(PORT_RETRY_S)


def _cannot_listen(config: Config, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(
            f"{config.host_name} is {config.host!r}, which is not an address of this machine; "
            "allowed: 'auto', or an IP address or a network interface of this machine"
        )
    name = config.port_name or "port"
    value = f"{config.port}" + ("" if config.port_name else " (the default)")
    rank = f"; data-parallel rank {port - config.port} listens on {port}"
    return ConfigError(
        f"{name} is {value}{rank if port != config.port else ''}; port {port} of {config.host} "
        f"cannot be used: {error.strerror}; allowed: a free port; set VLLM_NIXL_SIDE_CHANNEL_PORT "
        "(or 'port') to another port for each engine on this machine"
    )


# --- the checks of a start


class Where(enum.IntEnum):
    """The needs of a check, which decide the processes that run it. Each includes the former."""

    CONFIG = 0  # vLLM's configuration alone
    MACHINE = 1  # the files and addresses of a machine of the engine
    ENGINE = 2  # the process that will listen


def check_settings(_config: Config, vllm_config: Any) -> None:
    from nixl_kv.connector.vllm_config import check_supported  # noqa: PLC0415 - imports vLLM

    check_supported(vllm_config)


def check_conversations(config: Config, vllm_config: Any) -> None:
    from nixl_kv.connector.conversations.content import check_start  # noqa: PLC0415 - imports vLLM

    check_start(config, vllm_config)


def check_vllm(config: Config, vllm_config: Any) -> None:
    is_prefill = vllm_config.kv_transfer_config.kv_role != "kv_consumer"
    unpromised.check(unpromised.Engine(vllm_config, config, is_prefill=is_prefill))


def check_key(config: Config, _vllm_config: Any) -> None:
    from nixl_kv.engine.trust import Trust  # noqa: PLC0415 - not in every process

    Trust.of(config)


def check_share_dir(config: Config, _vllm_config: Any) -> None:
    config.make_share_dir()


def check_backends(config: Config, _vllm_config: Any) -> None:
    if config.backends != Config.backends:
        # It takes seconds, and a process that has loaded UCX must not fork.
        from nixl_kv.transport import nixl  # noqa: PLC0415

        nixl.check_backends(config.backends)


def check_port(config: Config, vllm_config: Any) -> None:
    is_prefill = vllm_config.kv_transfer_config.kv_role != "kv_consumer"
    check_address(config, vllm_config, is_prefill=is_prefill)


def check_wire_values(config: Config, vllm_config: Any) -> None:
    """Raise a ConfigError for a value of this engine that decode could not read in a ticket."""
    from nixl_kv.ids import EngineId, new_incarnation, new_nonce  # noqa: PLC0415 - not in every process
    from nixl_kv.protocol.ticket import MAX_NAME, MAX_WHY, SealedTicket, Ticket  # noqa: PLC0415

    name = vllm_config.kv_transfer_config.engine_id  # vLLM has made one for None
    if not (isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable()):
        raise ConfigError(
            f"engine_id of --kv-transfer-config is {printable(repr(name), MAX_SHOWN)}; allowed: "
            f"1 to {MAX_NAME} printable characters, so no line ends; to let vLLM make one, leave "
            "it out"
        )
    names: str | list[str] = vllm_config.model_config.served_model_name
    served = names if isinstance(names, str) else names[0]
    try:
        served.encode()  # peers compare it
        ticket = Ticket(
            host=config.host,
            port=config.port or 1,
            engine=EngineId(name),
            incarnation=new_incarnation(),
            nonce=new_nonce(),
            num_tokens=1,
            context=new_nonce(),
            weights=config.weights,
            media=new_nonce(),
            not_offered="x" * MAX_WHY,  # the longest ticket
            is_early=True,
        )
        read = SealedTicket.parse(ticket.params(None)).open()
    except (ValueError, TicketRefused) as error:
        raise ConfigError(
            f"decode could not read this engine's tickets: {error}; their values are engine_id "
            f"{name!r}, {config.host_name} {config.host!r}, weights {config.weights!r} and the "
            f"model's name {printable(repr(served), MAX_SHOWN)}; allowed: printable text in UTF-8; "
            "change the value that the error names"
        ) from error
    if read != ticket:
        raise ConfigError(f"decode would read {read} instead of {ticket}; choose another engine_id")


CHECKS: Final[tuple[tuple[Where, Callable[[Config, Any], None]], ...]] = (
    (Where.CONFIG, check_settings),
    (Where.CONFIG, check_conversations),
    (Where.CONFIG, check_wire_values),
    (Where.MACHINE, check_key),
    (Where.MACHINE, check_share_dir),
    (Where.ENGINE, check_vllm),
    (Where.ENGINE, check_port),
    (Where.ENGINE, check_backends),
)
"""In this order. Each gets the settings, and vLLM's configuration as the connector will see it.

It raises a ConfigError for a start that would fail, or go wrong, after the weights have loaded.
"""


def run_checks(vllm_config: Any, where: Where) -> None:
    """Run the checks for each connector of ours that an engine will have, in any MultiConnector."""
    whole = vllm_config.kv_transfer_config
    for transfer in () if whole is None else own_transfers(vars(whole)):
        is_here = where >= Where.MACHINE
        config = Config.of(transfer, os.environ) if is_here else without_host(transfer)
        seen = vllm_config
        if transfer is not vars(whole):
            seen = copy.copy(vllm_config)
            seen.kv_transfer_config = type(whole)(**transfer)
        for needs, check in CHECKS:
            if needs <= where:
                check(config, seen)


def check_before_weights(executor: Any) -> None:
    """Make vLLM's executor class check settings before it loads the model. Wraps it once."""
    # The scheduler, which listens, is created after the model is loaded, in the same process as
    # the executor. No hook of a connector gets the configuration earlier: vLLM 0.31 to 0.33 call
    # `get_required_kvcache_layout` after loading the weights.
    begin = executor.__init__
    if getattr(begin, "checks_start", False):
        return

    @functools.wraps(begin)
    def check_and_begin(self: Any, vllm_config: Any, *args: Any, **options: Any) -> None:
        if vllm_config.kv_transfer_config is not None:
            is_follower = vllm_config.parallel_config.node_rank_within_dp > 0  # it will not listen
            with causes_noted():
                run_checks(vllm_config, Where.MACHINE if is_follower else Where.ENGINE)
        begin(self, vllm_config, *args, **options)
        if has_ours(vllm_config) and not unpromised.is_off(unpromised.MEDIA):
            # Imports vLLM's scheduler, which exists in the engine's process alone.
            from nixl_kv.connector.scheduler_hooks import (  # noqa: PLC0415
                hook_scheduler,
                serve_address,
            )

            hook_scheduler(vllm_config)
            serve_address()

    setattr(check_and_begin, "checks_start", True)  # noqa: B010 - mypy knows no such attribute
    executor.__init__ = check_and_begin


def check_with_arguments(arguments: Any) -> None:
    """Make vLLM's class of arguments check a start in the process that begins it. Wraps it once."""
    make = arguments.create_engine_config
    if getattr(make, "checks_start", False):
        return

    @functools.wraps(make)
    def make_and_check(self: Any, *args: Any, **options: Any) -> Any:
        vllm_config = make(self, *args, **options)
        if has_ours(vllm_config):
            print_cause_at_exit()
            run_checks(vllm_config, Where.MACHINE if starts_here(vllm_config) else Where.CONFIG)
            if answers_early(vllm_config):
                wrap_engine_client()
        return vllm_config

    setattr(make_and_check, "checks_start", True)  # noqa: B010 - as above
    arguments.create_engine_config = make_and_check


def wrap_engine_client() -> None:
    """Let vLLM's engine client answer early, if it has all parts that this needs."""
    if unpromised.warn(unpromised.EARLY_ANSWER):
        return
    from nixl_kv.connector.early import wrap_client  # noqa: PLC0415 - imports vLLM's engine client

    wrap_client()


def starts_here(vllm_config: Any) -> bool:
    """Whether the engine surely starts on this machine: Ray may start it on any."""
    parallel = vllm_config.parallel_config
    return (
        parallel.data_parallel_size_local > 0
        and parallel.data_parallel_backend == "mp"
        and parallel.distributed_executor_backend in (None, "uni", "mp")
    )


# --- the cause of a failed start


@contextmanager
def causes_noted() -> Iterator[None]:
    """Leave the first error of ours for the process that began the start."""
    try:
        yield
    except NixlKVError as error:
        path = os.environ.get(CAUSE_FILE)
        if path:
            with suppress(OSError):  # another process was first, say; this one raises all the same
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                os.write(descriptor, str(error).encode(errors="backslashreplace"))
                os.close(descriptor)
        raise


def print_cause_at_exit() -> None:
    """Print what `causes_noted` leaves in the processes that this one starts, as the last line."""
    path = Path(tempfile.gettempdir(), f"nixl_kv-start-{secrets.token_hex(16)}")
    os.environ[CAUSE_FILE] = str(path)  # vLLM passes it on
    pid = os.getpid()

    def print_cause() -> None:
        if os.getpid() != pid:
            return
        with suppress(OSError):
            cause = path.read_text(encoding="utf-8", errors="replace")
            path.unlink()
            sys.stderr.write(f"nixl_kv: {printable(cause)}\n")

    atexit.register(print_cause)
