"""The commands `export` and `embed`: an encoder, or the features of data, for use elsewhere."""

import dataclasses
import shlex

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.base.files import user_path
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser

ABOUT_EXPORT = """Writes the encoder of a run as safetensors, for transformers, or as StableHLO.

  jepa-jax export --workdir=runs/quickstart --format=safetensors --output=exports/quickstart

safetensors  model.safetensors and a config.json; jepa_jax.weights.load_model reads them back bit for bit, and so does
             --config.model.init_from
hf           a directory that transformers' ViTModel, IJepaModel, Dinov2Model or ResNetModel loads
stablehlo    one function for CPUs and NVIDIA GPUs, uint8 images of any number to features; it runs with jax alone.
             The only format for encoders of other elements, which take a dict of arrays

A model card, README.md, lies beside: use, data, recipe, command, accuracies with their baselines.
"""
ABOUT_EMBED = """Writes the features of all images of a folder, by name.

  jepa-jax embed --workdir=runs/quickstart --input=photos --output=photos.npz
  jepa-jax embed --weights=hub:facebook/dinov2-small --input=photos --output=photos.parquet --neighbours=cat.jpg

An encoder of other elements takes --input=FILE.npz with the arrays that it reads; features are numbered then.

Sub-folders are read too. F.npz holds `names` and `features` [N, F] in float32, F.parquet the columns `name` and
`features`. The same command continues where an interrupted one stopped. --neighbours also writes F.html: the images
that are nearest to one or several of them, by the cosine of their features.
"""


def add_export_flags(parser: Parser) -> None:
    parser.add_flag("workdir", "DIR", "folder of a run", required=True)
    parser.add_trust()
    parser.add_flag("format", "FORMAT", "safetensors, hf or stablehlo", required=True)
    parser.add_flag("output", "DIR", "folder to write", required=True)


def run_export(arguments: Arguments, console: Console) -> Result:
    from jepa_jax.exports.export import export_encoder

    made = export_encoder(arguments.workdir, arguments.format, arguments.output)
    files = "\n".join(f"  {name:<26} {size:>12,} bytes" for name, size in made.files.items())
    facts = f"{made.feature_dim} features; model card: {made.folder}/README.md"
    text, folder = f"{made.folder}\n{files}\n{facts}", shlex.quote(str(made.folder))
    reads = {"safetensors": [f"embed --weights={folder} --input=FOLDER_OF_IMAGES --output=features.npz"]}
    record = dataclasses.asdict(made) | {"folder": str(made.folder)}
    return Result([record], text, next=reads.get(arguments.format, []))


def add_embed_flags(parser: Parser) -> None:
    parser.add_flag("workdir", "DIR", "folder of a run whose encoder is used; or give --weights")
    parser.add_flag("weights", "SOURCE", "folder or .safetensors file of public or exported weights, or hub:OWNER/NAME")
    parser.add_trust()
    parser.add_flag("input", "DIR", "folder of images, or FILE.npz of arrays", required=True)
    parser.add_flag("output", "FILE", "file to write: F.npz or F.parquet", required=True)
    parser.add_flag("batch_size", "N", "images per call of the encoder", 64, least=1)
    parser.add_flag(
        "image_size", "N", "pixels per side, with --weights; 0 = those that the model was made for", 0, least=0
    )
    parser.add_flag("pool", "KIND", "mean, grid2 or cls, with --weights: what features are made of")
    parser.add_flag("on_error", "WHAT", "unreadable image: refuse, or skip and say so", "refuse")
    parser.add_flag("neighbours", "IMAGES", "names below --input, with commas, or `sample` for some of them", "")


def run_embed(arguments: Arguments, console: Console) -> Result:
    from jepa_jax.exports.embed import embed_folder, list_images, open_embedder, shown
    from jepa_jax.reports.neighbours_page import queries, write_neighbours

    if bool(arguments.workdir) == bool(arguments.weights):
        raise UserError("give either --workdir (the encoder of a run) or --weights (public or exported ones)")
    if arguments.on_error not in ("refuse", "skip"):
        raise UserError(f"--on_error={arguments.on_error}: not one of refuse, skip")
    if arguments.input.endswith(".npz"):
        return _embed_arrays(arguments)
    if arguments.neighbours:  # before hours of work that would end in this error
        names = list_images(user_path(arguments.input, "--input"))
        queries([shown(name) for name in names], arguments.neighbours)
    embedder = open_embedder(
        workdir=arguments.workdir,
        weights=arguments.weights,
        batch_size=arguments.batch_size,
        image_size=arguments.image_size,
        pool=arguments.pool,
    )
    console.line(f"encoder  {embedder.in_words}")
    made = embed_folder(embedder, arguments.input, arguments.output, skip=arguments.on_error == "skip", console=console)
    lines = [f"{made.output}: {len(made.names):,} images, {made.features.shape[1]} features each"]
    if made.skipped:
        lines.append(f"{len(made.skipped)} images could not be read and were left out, the first: {made.skipped[0]}")
    page = write_neighbours(made, arguments.input, arguments.neighbours) if arguments.neighbours else None
    if page:
        lines.append(f"neighbours: {page}")
    record = {
        "output": str(made.output), "images": len(made.names), "features": int(made.features.shape[1]),
        "skipped": len(made.skipped), "continued_from": made.reused, "page": str(page) if page else None,
    }  # fmt: skip
    source = f"--workdir={arguments.workdir}" if arguments.workdir else f"--weights={arguments.weights}"
    places = f"--input={shlex.quote(arguments.input)} --output={shlex.quote(arguments.output)}"
    following = [] if page else [f"embed {shlex.quote(source)} {places} --neighbours=sample"]
    return Result([record], "\n".join(lines), next=following)


def _embed_arrays(arguments: Arguments) -> Result:
    from jepa_jax.exports.embed import embed_arrays

    if not arguments.workdir or arguments.neighbours:
        raise UserError(f"--input={arguments.input}: arrays go with --workdir, and without --neighbours")
    made = embed_arrays(arguments.workdir, arguments.input, arguments.output, arguments.batch_size)
    count, features = made.features.shape
    record = {"output": str(made.output), "elements": count, "features": features}
    return Result([record], f"{made.output}: {count:,} elements, {features} features each")


EXPORT = Command("export", ABOUT_EXPORT, add_export_flags, run_export)
EMBED = Command("embed", ABOUT_EMBED, add_embed_flags, run_embed, shows_start=True)
