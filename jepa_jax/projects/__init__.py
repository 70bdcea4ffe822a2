"""Fields of application, one package each, which use the core's public contracts; see docs/design.md, "Projects"."""
