"""The `embforge` command."""

from __future__ import annotations

import click

from embforge.codegen.cli.bench import bench
from embforge.codegen.cli.cache import cache
from embforge.codegen.cli.common import EXIT_CODES
from embforge.codegen.cli.demo import demo
from embforge.codegen.cli.env import env
from embforge.codegen.cli.failures import JSON_ERRORS, Commands
from embforge.codegen.cli.gen import gen
from embforge.codegen.cli.plan import plan
from embforge.codegen.cli.record import record
from embforge.codegen.cli.schema import schema
from embforge.codegen.cli.tune import tune
from embforge.codegen.cli.tuned import tuned
from embforge.codegen.cli.verify import verify


@click.group(
    cls=Commands, epilog=f"{EXIT_CODES}\n\n{JSON_ERRORS}", context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(package_name="embforge")
def main() -> None:
    """Fused embedding kernels, generated for your spec, for any GPU since sm_75 and for this CPU.

    SPEC is a TOML file of tables and features, or an example by its name: dlrm, llm_vocab, mixed.
    """


for _command in (gen, verify, bench, tune, tuned, plan, record, env, cache, schema, demo):
    main.add_command(_command)
