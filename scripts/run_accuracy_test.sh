#!/usr/bin/env bash
# Accuracy of prefill and decode apart, by lm-eval through a router: docs/accuracy.md has the knobs.
#
#   [ATTENTION_BACKEND=FLASHINFER] [DECODER_TP_SIZE=2] ... bash scripts/run_accuracy_test.sh [--help]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lab/accuracy/run.sh" "$@"
