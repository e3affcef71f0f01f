"""Tests of quantdiff.models."""
