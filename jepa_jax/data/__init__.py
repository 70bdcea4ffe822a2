"""Where samples are (sources), how they reach the device (pipeline) and how views are made from them (augment)."""
