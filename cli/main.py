"""The `embforge` command."""

from __future__ import annotations

import click

from embforge.cli.bench import bench
from embforge.cli.cache import cache
from embforge.cli.common import EXIT_CODES
from embforge.cli.demo import demo
from embforge.cli.env import env
from embforge.cli.failures import JSON_ERRORS, Commands
from embforge.cli.gen import gen
from embforge.cli.plan import plan
from embforge.cli.record import record
from embforge.cli.schema import schema
from embforge.cli.tune import tune
from embforge.cli.tuned import tuned
from embforge.cli.verify import verify


@click.group(
    cls=Commands, epilog=f"{EXIT_CODES}\n\n{JSON_ERRORS}", context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(package_name="embforge")
def main() -> None:
    """Generate, check, time and tune fused embedding kernels for your tables, on any GPU since sm_75 and on CPUs.

    SPEC is a TOML file of tables and features, or the name of an example: dlrm, llm_vocab, mixed.
    """


for _command in (gen, verify, bench, tune, tuned, plan, record, env, cache, schema, demo):
    main.add_command(_command)
