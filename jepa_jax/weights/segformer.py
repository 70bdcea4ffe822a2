"""Names of `SegformerForSemanticSegmentation` as transformers saves it."""

from jepa_jax.weights.names import Rule, Table, batch_norm, both, convolution, dense, norm

ARCHITECTURE = "SegformerForSemanticSegmentation"

_BLOCK, _OUR_BLOCK = "segformer.encoder.block.{i}.{j}", "encoder.stages.{i}.blocks.{j}"

TABLE: Table = (
    *both("segformer.encoder.patch_embeddings.{i}.proj", "encoder.stages.{i}.embed", convolution),
    *norm("segformer.encoder.patch_embeddings.{i}.layer_norm", "encoder.stages.{i}.embed_norm"),
    *norm(f"{_BLOCK}.layer_norm_1", f"{_OUR_BLOCK}.norm1"),
    *both(f"{_BLOCK}.attention.self.query", f"{_OUR_BLOCK}.attention.query", dense),
    *both(f"{_BLOCK}.attention.self.key", f"{_OUR_BLOCK}.attention.key_value", dense),
    *both(f"{_BLOCK}.attention.self.value", f"{_OUR_BLOCK}.attention.key_value", dense),
    *both(f"{_BLOCK}.attention.self.sr", f"{_OUR_BLOCK}.attention.reduce", convolution),
    *norm(f"{_BLOCK}.attention.self.layer_norm", f"{_OUR_BLOCK}.attention.reduce_norm"),
    *both(f"{_BLOCK}.attention.output.dense", f"{_OUR_BLOCK}.attention.out", dense),
    *norm(f"{_BLOCK}.layer_norm_2", f"{_OUR_BLOCK}.norm2"),
    *both(f"{_BLOCK}.mlp.dense1", f"{_OUR_BLOCK}.up", dense),
    *both(f"{_BLOCK}.mlp.dwconv.dwconv", f"{_OUR_BLOCK}.depthwise", convolution),
    *both(f"{_BLOCK}.mlp.dense2", f"{_OUR_BLOCK}.down", dense),
    *norm("segformer.encoder.layer_norm.{i}", "encoder.stages.{i}.norm"),
    *both("decode_head.linear_c.{i}.proj", "head.project.{i}", dense),
    Rule("decode_head.linear_fuse.weight", "head.fuse", dense),
    *batch_norm("decode_head.batch_norm", "head.norm"),
    *both("decode_head.classifier", "head.classifier", dense),
)
