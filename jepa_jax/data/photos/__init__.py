"""Photographs of any size: decoding, random crops of the full image, and the sources that read them."""
