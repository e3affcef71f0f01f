"""Tests of quantdiff; the folders mirror the packages."""
