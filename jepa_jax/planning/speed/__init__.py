"""How long the kernels of a program take: efficiencies that published measurements gave, and their fit."""
