#!/usr/bin/env bash
# What the container finds on the board, and whether its GPU computes what NumPy does.
set -ex

edgellm doctor
