"""Predicts whether a run fits a GPU, its largest batch and a bound on its speed. Needs no GPU.

  jepa-jax plan --config=rapid --gpu=rtx4090
  jepa-jax plan --config=ijepa_in1k_vitb --gpu=a100-80,h100 --topology=1x1x8 [--fsdp]
  jepa-jax plan --config=rapid --gpu=all --price_table=prices.toml --html=cards.html
  jepa-jax plan --config=rapid --gpu=rtx4090 --frontier=frontier.html --memory_budget=10
  jepa-jax plan --config=rapid --gpu=rtx3090 --ladder

Compiles the training step of the config for each GPU (pip install 'jepa_jax[plan]'). Plans are cached, so asking again
is free. --ladder adds the sizes in the LADDER of the config's file, or else its batch doubled until it no longer fits:
memory by parts, operations, predicted speed, changes that save memory, rules of thumb for the learning rate.

A GPU that the step cannot be compiled for gets a row with the reason.

Exit codes: 0 fits every GPU asked for, 2 something to fix, 4 does not fit one of them (alternatives are printed).
"""

from jepa_jax.base.console import Console
from jepa_jax.base.errors import EXIT_DOES_NOT_FIT, EXIT_OK, UserError
from jepa_jax.base.files import write_json
from jepa_jax.base.machine import has_nvidia_driver
from jepa_jax.base.text import parse_numbers
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser, config_name, fields_from, planned_config_from
from jepa_jax.runtime import platforms


def add_flags(parser: Parser) -> None:
    parser.add_config()
    parser.add_list(
        "gpu",
        "LIST",
        "names from the table of GPUs, separated by commas or repeated; here: the card of this machine, all: the "
        "whole table (default: rtx4090)",
    )
    parser.add_flag("topology", "AxBxC", "slices x hosts x GPUs per host", "1x1x1")
    parser.add_flag("batch_sizes", "LIST", "other batch sizes to plan as well", default="")
    parser.add_flag("price_per_hour", "PRICE", "of one GPU, in any currency; adds the price of the run", 0.0, least=0)
    parser.add_flag("price_table", "FILE", "TOML file of prices per hour, e.g. rtx4090 = 0.45", default="")
    parser.add_flag(
        "frontier", "FILE", "compile policies of remat and accumulation, and draw memory against time on this page", ""
    )
    parser.add_flag("memory_budget", "GIB", "that the advice of --frontier keeps to; 0 = the card", 0.0, least=0)
    parser.add_flag("gpu_table", "FILE", "TOML file with more GPUs; see jepa_jax/runtime/hardware.toml", default="")
    parser.add_switch_or_value("json", "FILE", "print JSON also on a terminal; with a FILE, also write the plans there")
    parser.add_flag("html", "FILE", "also write a page")
    parser.add_switch("fsdp", "also split parameters and optimizer state over all devices")
    parser.add_switch("variants", "also plan remat, accumulation and the other precision", default=True)
    parser.add_switch("largest", "look for the largest batch (never done for more than 4 GPUs)", default=True)
    parser.add_switch("loader", "measure the loader of this machine for a second", default=True)
    parser.add_switch("ladder", "also plan a ladder of sizes, and what to change when the largest does not fit")
    parser.add_flag(
        "sizes_of", "LIST", "rungs to plan at every size of batches, or all; default: first and largest", ""
    )
    parser.add_switch("check", "compare with what can be measured here: FLOPs; on a GPU also the peak memory")


def run_plan(arguments: Arguments, console: Console) -> Result:
    if not (arguments.check and has_nvidia_driver()):
        platforms.prepare_to_plan()

    import jax

    from jepa_jax.config.recipe import read_ladder
    from jepa_jax.planning.plan_command import PlanOptions, check_flops, check_peak, make_plans
    from jepa_jax.reports.page import Page, write_page
    from jepa_jax.reports.parts import Section
    from jepa_jax.reports.plan_page import frontier_chart, plan_page
    from jepa_jax.reports.plan_text import FAILED, failed_json, plan_json, plan_lines

    config, name = planned_config_from(arguments), config_name(arguments)
    sizes = parse_numbers("batch_sizes", arguments.batch_sizes, int, smallest=2) if arguments.batch_sizes else []
    lists = {"gpus": tuple(arguments.gpu or ["rtx4090"]), "batch_sizes": tuple(sizes)}
    options = PlanOptions(**fields_from(arguments, PlanOptions) | lists)
    if options.frontier.endswith(".png"):
        raise UserError(f"--frontier={options.frontier}: the chart is a page; name an HTML file")
    ladder = read_ladder(arguments.config) if options.ladder else ()
    plans, failed, about = make_plans(config, options, console, ladder)
    results = [plan_json(plan, about) for plan in plans] + [failed_json(one) for one in failed]
    lines = [line for plan in plans for line in plan_lines(plan, about, name)]
    lines += [f"\n{name} on {one.request.describe()}\nverdict: {FAILED} ({one.reason})" for one in failed]
    file = arguments.json if isinstance(arguments.json, str) else None
    if file:
        write_json(file, results)  # before the check, which may run out of memory
    if plans[0].frontier:
        title = f"{name} on {plans[0].request.gpu.name}"
        write_page(options.frontier, Page(title, [Section("Frontier", [frontier_chart(plans[0].frontier)])]))
    if arguments.html:
        write_page(arguments.html, plan_page(plans, about, name, failed))
    if arguments.check:
        on_gpu = jax.local_devices()[0].platform == "gpu"
        check = check_peak(plans[0], about.data) if on_gpu else check_flops(config, about.data)
        results[0]["check_error_percent"] = check.error_percent
        figures = f"predicted {check.predicted:,.4g}, {check.measured:,.4g} ({check.error_percent:+.2f} %)"
        lines.append(f"check: {check.what}: {figures}")
        if file:
            write_json(file, results)
    fits = not failed and all(plan.estimate.fits for plan in plans)
    return Result(results, "\n".join(lines), EXIT_OK if fits else EXIT_DOES_NOT_FIT)


PLAN = Command("plan", __doc__, add_flags, run_plan)
