"""Thousands of conversations with tools at one time, on engines that only take time."""
