"""XLA flags with which programs compile fast: tests compile much and compute little."""

from importlib import metadata

FAST_TO_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if metadata.version("jaxlib") < "0.11":  # an unknown flag ends the process
    FAST_TO_COMPILE += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
