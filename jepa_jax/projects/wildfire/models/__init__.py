"""Models that predict masks: SegFormer, a U-Net, and EmberFormer, which has one of them as its decoder."""
