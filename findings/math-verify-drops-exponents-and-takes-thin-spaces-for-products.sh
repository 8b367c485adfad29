#!/usr/bin/env bash
# math-verify 0.9.0 (latex2sympy2_extended 1.11.0): two usual ways to write a number are read as another number.
#
# 1. In plain text the exponent of a number is dropped: an answer of 1e-3 is verified against 1, and 6.02E23 against 6.02.
#    Between dollar signs the e is Euler's number, so that 1e-3 is e - 3 there.
# 2. In LaTeX a thin space between groups of three digits is a product: 12\,000 is 12 * 0. A solution written so gives
#    its reward to the answer 0, and none to 12000. 12{,}000 is read right.
#
# Rewards of GRPO that call verify(parse(solution), parse(answer)) get these values without a message.
#
# Fails if a number is read otherwise.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q 'math-verify[antlr4_13_2]==0.9.0' latex2sympy2_extended==1.11.0 sympy==1.14.0
cd "$work"
cat > read.py <<'P'
from math_verify import parse, verify

CASES = [  # solution, answer, is the answer right, what verify says
    ("0.001", "1e-3", True, False),
    ("1", "1e-3", False, True),
    ("1", "The answer is 1e-3.", False, True),
    ("6.02", "6.02E23", False, True),
    ("$0.001$", "$1e-3$", True, False),
    ("$1000$", "$1e3$", True, False),
    (r"\boxed{12\,000}", r"\boxed{12000}", True, False),
    (r"\boxed{12\,000}", r"\boxed{0}", False, True),
    (r"\boxed{12{,}000}", r"\boxed{12000}", True, True),
    (r"\boxed{12,000}", r"\boxed{12000}", True, True),
]
for solution, answer, is_right, expected in CASES:
    said = verify(parse(solution), parse(answer))
    print(f"{solution:18} {answer:22} right={is_right!s:5} verify={said!s:5} read as {parse(solution)[0]}, {parse(answer)[0]}")
    assert said is expected, (solution, answer)
P
env/bin/python read.py
