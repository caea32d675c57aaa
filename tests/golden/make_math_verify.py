"""Verdicts of math-verify on pairs of solution and response.

    pip install math-verify==0.9.0 latex2sympy2_extended==1.11.0 antlr4-python3-runtime==4.13.2 sympy==1.14.0
    python3 make_math_verify.py        # writes math_verify.jsonl beside itself

The settings are those of `accuracy_reward` of TRL 1.11.0. `verdict` is 1 or 0, or null where the solution cannot be parsed and the
reward is None. With `--check`, the verdicts are compared with `trl.rewards.accuracy_reward` itself (pip install trl==1.11.0).
"""

import json
import logging
import pathlib
import sys

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

# Solution and the content of the response's box. Solutions are in dollars unless they start with "=".
BOXED = [
    # Integers, signs, separators.
    ("=72", "72"), ("=72", "72.0"), ("=72", "73"), ("=72", "-72"), ("=-3", "-3"), ("=-3", "3"), ("=0", "0"), ("=0", "-0"),
    ("=1,000", "1000"), ("=1000", "1,000"), ("=1000", "1{,}000"), ("=1000000", "1,000,000"), ("=1000", "10,00"),
    ("=1234567", "1,234,567"), ("=12", "12,000"), ("=10000", r"10\,000"), ("=10000", "10 000"), ("=7", "007"), ("=7", "+7"), ("=7", "--7"),
    ("=18", r"\$18"), ("=18", "18 dollars"), ("=18", r"\$18.00"), ("=18.50", r"\$18.5"), ("=$18", "18"), ("=18", "$18"),
    ("=5", "5."), ("=5", "5,"), ("=5", "(5)"), ("=5", "[5]"), ("=5", r"\{5\}"), ("=5", "{5}"), ("=5", r"\text{5}"), ("=5", r"\mathbf{5}"),
    ("=5", ""), ("=5", " "), ("=5", "five"), ("=5", "x"), ("=5", "x=5"), ("=5", "5=x"), ("=5", "n = 5"), ("=5", "2+3"), ("=5", r"2+3=5"),
    ("=6", r"2 \times 3"), ("=6", r"2 \cdot 3"), ("=6", "2*3"), ("=6", "12/2"), ("=6", r"12 \div 2"), ("=6", "3!"), ("=6", "2(3)"), ("=5", "2(3)"),
    ("=120", "5!"), ("=3628800", "10!"), ("=10", r"\binom{5}{2}"), ("=10", r"{5 \choose 2}"), ("=1024", "2^{10}"), ("=1024", "2^10"),
    ("=1267650600228229401496703205376", "2^{100}"), ("=3", "|-3|"), ("=3", r"\left|-3\right|"), ("=3", r"\lfloor 3.7 \rfloor"), ("=4", r"\lceil 3.2 \rceil"),
    ("=3", r"\sqrt{9}"), ("=2", r"\sqrt[3]{8}"), ("=-4", "-2^2"), ("=4", "(-2)^2"), ("=512", "2^{3^2}"), ("=9", "6/2*3"), ("=14", "2+3*4"),
    # Fractions and decimals.
    (r"\frac{1}{2}", "0.5"), (r"\frac{1}{2}", "1/2"), (r"\frac{1}{2}", r"\dfrac{1}{2}"), (r"\frac{1}{2}", r"\tfrac{1}{2}"), (r"\frac{1}{2}", r"\frac12"),
    (r"\frac12", r"\frac{1}{2}"), (r"\frac{1}{2}", r"\frac{2}{4}"), (r"\frac{1}{2}", ".5"), (r"\frac{1}{2}", "0.50"), (r"\frac{1}{2}", r"50\%"),
    (r"\frac{1}{2}", r"\frac{1}{3}"), (r"\frac{1}{3}", "0.333333"), (r"\frac{1}{3}", "0.33333"), (r"\frac{1}{3}", "0.3333333333"), (r"\frac{1}{3}", "0.33"),
    (r"\frac{2}{3}", "0.666667"), (r"\frac{2}{3}", "0.666666"), ("=1/3", r"\frac{1}{3}"), ("=1/3", r"\frac{2}{6}"), ("=0.25", r"\frac{1}{4}"),
    (r"-\frac{3}{4}", r"\frac{-3}{4}"), (r"-\frac{3}{4}", r"\frac{3}{-4}"), (r"-\frac{3}{4}", r"\frac{3}{4}"), (r"-\frac{3}{4}", "-0.75"),
    (r"\frac{22}{7}", "3.142857"), (r"\frac{22}{7}", "3.14"), ("=3.14", "3.140"), ("=3.14", "3.1400001"), ("=3.14", "3.141"), ("=0.1", "0.1000004"), ("=0.1", "0.100001"),
    (r"2\frac{1}{2}", "2.5"), (r"2\frac{1}{2}", r"\frac{5}{2}"), (r"\frac{5}{2}", r"2\frac{1}{2}"), (r"-2\frac{1}{2}", "-2.5"), (r"\frac{5}{2}", r"2 \frac{1}{2}"),
    (r"2\frac{1}{2}", "1"), ("=3/2", "2 1/2"), (r"\frac{a}{b}", "a/b"), (r"\frac{1}{2}x", "x/2"), (r"\frac{1}{2x}", "1/2x"), (r"\frac{x}{2}", "1/2x"),
    (r"\frac{1}{6}", "1/2/3"), (r"\frac{1}{6}", r"\frac{1/2}{3}"), (r"\frac{3}{4}", "3:4"), ("=1/0", "1/0"), (r"\frac{1}{0}", r"\infty"), ("=0", r"\frac{0}{5}"),
    ("=0.3", "0.1+0.2"), ("=0.000001", "10^{-6}"), ("=0.0000001", "10^{-7}"), ("=0.0000001", "0"), ("=1234.5", "1,234.50"), ("=1,234.50", "1234.5"),
    # Percent.
    ("=50%", r"50\%"), ("=50%", "50"), ("=50", r"50\%"), ("=50%", "0.5"), ("=0.5", r"50\%"), (r"12.5\%", "12.5"), (r"12.5\%", "0.125"), (r"12.5\%", r"12.5\%"),
    (r"50\%", r"\frac{1}{2}"), (r"50\%", "50 percent"), (r"50\%", "50 percentage"), (r"50\%", r"50\text{ percent}"), (r"50\%", "40"), ("=1", r"100\%"), ("=100", r"100\%"),
    (r"\frac{1}{8}", r"12.5\%"), ("=5", r"-5\%"), (r"33\frac{1}{3}\%", r"\frac{1}{3}"), ("=20", r"20\% \text{ off}"),
    # Units and text.
    ("=5", r"5\text{ cm}"), ("=5", "5 cm"), ("=5", "5cm"), ("=5", r"5\ \text{cm}"), ("=5", r"5\,\text{cm}"), ("=5", r"5\text{ cm}^2"), ("=5", r"5\text{ cm}^{2}"),
    ("=5", r"5\mathrm{cm}"), ("=5", r"5\mbox{ cm}"), ("=5", "5 kilometers"), ("=5", "5 hours"), ("=5", r"5 \text{ miles per hour}"), ("=5", "5 apples"), ("=5", "5 bananas"),
    ("=5", "5 m^2"), ("=5", "5 feet"), ("=5", "5th"), ("=5", r"5^{\text{th}}"), (r"5\text{ cm}", "5"), (r"5\text{ cm}", r"5\text{ m}"), ("5x", "5"), ("=30", r"30^\circ"),
    ("=30", r"30^{\circ}"), ("30^\\circ", "30"), (r"30^\circ", r"30 \text{ degrees}"), (r"30^\circ", "30°"), ("=30", r"\angle A = 30^\circ"), ("=7", r"7~\text{cm}"),
    (r"\text{Evelyn}", r"\text{Evelyn}"), (r"\text{Evelyn}", "Evelyn"), (r"\text{Evelyn}", r"\text{evelyn}"), (r"\text{Evelyn}", r"\text{Carla}"), (r"\text{B}", "B"),
    (r"\text{(B)}", "B"), (r"\text{(B)}", "(B)"), (r"\text{(B)}", r"\textbf{(B)}"), (r"\text{(B)}", "C"), ("B", r"\mathrm{B}"), ("B", "b"), (r"\text{yes}", r"\text{Yes}"),
    (r"\text{yes}", "yes"), (r"\text{yes}", r"\text{no}"), (r"\text{even}", r"\text{odd}"), (r"\text{no solution}", r"\text{No solution}"), (r"\text{east}", "east"),
    (r"\text{no solution}", r"\emptyset"), (r"\text{A and B}", "A, B"), (r"\text{5}", "5"),
    # Roots, powers, constants.
    (r"\sqrt{2}", "1.414214"), (r"\sqrt{2}", "1.414"), (r"\sqrt{2}", "2^{1/2}"), (r"\sqrt{2}", r"\sqrt2"), (r"\sqrt2", r"\sqrt{2}"), (r"\sqrt{12}", r"2\sqrt{3}"),
    (r"2\sqrt{3}", r"\sqrt{12}"), (r"2\sqrt{3}", r"3\sqrt{2}"), (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"), (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    (r"\sqrt{6}", r"\sqrt{2}\sqrt{3}"), (r"\sqrt{6}", r"\sqrt{5}"), (r"1+\sqrt{2}", r"\sqrt{3+2\sqrt{2}}"), (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}"), (r"\sqrt{\frac{1}{2}}", r"\frac{\sqrt{2}}{2}"),
    (r"4", r"8^{2/3}"), ("=4", r"16^{0.5}"), (r"\sqrt[3]{2}", "2^{1/3}"), (r"\sqrt[4]{4}", r"\sqrt{2}"), (r"\pi", "3.141593"), (r"\pi", "3.14159"), (r"\pi", "3.14"), (r"\pi", r"\frac{22}{7}"),
    (r"2\pi", r"\pi \cdot 2"), (r"2\pi", r"\pi + \pi"), (r"\frac{\pi}{3}", r"\pi/3"), (r"100\pi", "100π"), (r"100\pi", "314.159265"), ("e", "2.718282"), ("e^2", r"e \cdot e"), ("e^2", r"\exp(2)"),
    (r"\ln 2", "0.693147"), (r"\log_2 8", "3"), (r"\log 100", "2"), (r"\ln e", "1"), (r"\ln 8", r"3\ln 2"), (r"\ln 6", r"\ln 2 + \ln 3"), (r"\frac{1}{2}", r"\cos\frac{\pi}{3}"), (r"\frac{1}{2}", r"\sin 30^\circ"),
    (r"1.5 \times 10^3", "1500"), (r"1.5 \times 10^{-3}", "0.0015"), ("=1500", r"1.5 \cdot 10^3"), ("=1500", "1.5E3"), ("=1500", "1.5e3"), (r"6.02 \times 10^{23}", r"6.02 \times 10^{23}"),
    (r"6.02 \times 10^{23}", r"6.03 \times 10^{23}"), (r"2^{100}", r"4^{50}"), (r"2^{1000}", r"4^{500}"), (r"2^{1000}", r"2^{1001}"), ("9^{9^9}", "9^{9^9}"), ("9^{9^9}", "9^{9^8}"), ("100!", "100!"), ("100!", "99!"),
    (r"\infty", r"\infty"), (r"\infty", r"+\infty"), (r"\infty", r"-\infty"), (r"\infty", "infinity"), (r"\infty", "1000"), (r"-\infty", r"-\infty"), ("i", "i"), ("3+4i", "4i+3"), ("3+4i", "3-4i"), ("-1", "i^2"),
    # Algebra.
    ("x^2+2x+1", "(x+1)^2"), ("x^2+2x+1", "1+2x+x^2"), ("x^2+2x+1", "(x-1)^2"), ("x^2-1", "(x-1)(x+1)"), ("(x-1)(x+1)", "(x+1)(x-1)"), ("x(x+1)", "x^2+x"), ("2x+3", "3+2x"), ("2x+3", "2x-3"), ("2x+3", "2y+3"),
    ("xy", "yx"), ("x", "X"), ("a+b", "b+a"), ("a-b", "b-a"), ("a-b", "-(b-a)"), ("x+1", r"\frac{x^2-1}{x-1}"), (r"\frac{1}{x}+\frac{1}{y}", r"\frac{x+y}{xy}"), (r"\frac{n(n+1)}{2}", "n(n+1)/2"),
    (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}"), (r"\frac{n(n+1)}{2}", r"\frac{n(n-1)}{2}"), ("x^{-1}", r"\frac{1}{x}"), (r"\sqrt{x}", "x^{1/2}"), (r"\sqrt{x^2}", "|x|"), (r"\sqrt{x^2}", "x"), ("2^{x+1}", r"2 \cdot 2^x"),
    ("e^{2x}", "(e^x)^2"), (r"\sin^2 x + \cos^2 x", "1"), (r"\sin 2x", r"2\sin x \cos x"), (r"\sin x", r"\cos x"), (r"\tan x", r"\frac{\sin x}{\cos x}"), (r"\ln x^2", r"2\ln x"), ("a_1+a_2", "a_2+a_{1}"), (r"\alpha+\beta", r"\beta+\alpha"),
    ("f(x)=2x", "2x"), ("f(x)=2x", "f(x)=2x"), ("f(2)", "f(3)"), ("(a+b)^3", "a^3+3a^2b+3ab^2+b^3"), ("x^2y", "yx^2"), (r"2x^2 \cdot 3x", "6x^3"), ("-x", "x"), ("3c", "3"), ("5c", "2c+3c"), ("0", "x-x"),
    # Equations and inequalities.
    ("x=5", "5"), ("x=5", "x=5"), ("x=5", "y=5"), ("x=5", "x=6"), ("x=5", "5=x"), ("5", "x=5"), ("y=2x+1", "2x+1"), ("y=2x+1", "y=1+2x"), ("y=2x+1", "2x-y+1=0"), ("y=2x+1", "y-2x=1"), ("y=2x+1", "y=2x-1"),
    ("2x+2y=4", "x+y=2"), ("x+y=2", "x+y=3"), ("x+y=2", "2"), ("2x=4", "x=2"), ("2x=4", "4"), ("x^2=4", "x=2"), ("a=b=5", "5"), ("a=2, b=3", "a=2, b=3"), ("a=2, b=3", "b=3, a=2"), ("a=2, b=3", "2, 3"),
    ("x=1 \\text{ or } x=2", "x=1, x=2"), ("x=1,2", "x=2,1"), ("x=1,2", "1,2"), (r"x=\pm 2", r"\pm 2"), (r"x=\pm 2", "2,-2"), (r"x=\pm 2", r"x=2, x=-2"), ("x = 5", "x = 5 \\text{ cm}"), ("A=\\pi r^2", "\\pi r^2"),
    ("x>3", "x>3"), ("x>3", "3<x"), ("x>3", "x<3"), ("x>3", r"x \ge 3"), (r"x \geq 3", r"x \ge 3"), ("x>3", "2x>6"), ("x>3", r"(3,\infty)"), ("x>3", r"[3,\infty)"), (r"(3,\infty)", "x>3"), ("1<x<2", "(1,2)"), ("1<x<2", "1<x<2"),
    (r"1 \le x < 2", "[1,2)"), (r"1 \le x < 2", "(1,2)"), ("1<x<2", "2>x>1"), ("x-1>0", "x>1"), ("-x<-3", "x>3"), (r"x \neq 3", r"x \ne 3"), (r"x \neq 3", "x=3"), ("x<2", "x<2, x>5"),
    # Sets, tuples, intervals.
    (r"\{1,2\}", r"\{2,1\}"), (r"\{1,2\}", "1,2"), (r"\{1,2\}", "2, 1"), (r"\{1,2\}", r"\{1,2,3\}"), (r"\{1,2\}", r"\{1,3\}"), (r"\{1,2,3\}", "1, 2, and 3"), ("1,2,3", "3,2,1"), (r"\{1,2\}", "(1,2)"), (r"\{1,2\}", "(2,1)"),
    (r"\{1,1,2\}", r"\{1,2\}"), (r"\{\frac{1}{2},3\}", r"\{0.5,3\}"), (r"\{-1,1\}", r"\pm 1"), (r"\pm 1", "1, -1"), (r"\pm 1", "1"), (r"2 \pm \sqrt{3}", r"2+\sqrt{3}, 2-\sqrt{3}"), (r"2 \pm \sqrt{3}", r"2 \pm \sqrt{5}"), (r"\{5\}", "5"),
    (r"\{\}", r"\emptyset"), (r"\emptyset", r"\varnothing"), (r"\{x, x^2\}", r"\{x^2, x\}"), (r"\{(1,2),(3,4)\}", "(1,2),(3,4)"), (r"\{(1,2),(3,4)\}", "(3,4),(1,2)"), (r"\{(1,2),(3,4)\}", "(1,2),(4,3)"), ("1 \\text{ and } 2", "1,2"), ("12 and 13", "12, 13"),
    ("(1,2)", "(1,2)"), ("(1,2)", "(2,1)"), ("(2,1)", "(2,1)"), ("(2,1)", "(1,2)"), ("(2,1)", "2,1"), ("(2,1)", "1,2"), ("(1,2)", "1,2"), ("(1,2)", "2,1"), ("(1,2)", "[1,2]"), ("(1,2)", "(1,2]"), ("(1,2,3)", "(1,2,3)"), ("(1,2,3)", "(3,2,1)"), ("(1,2,3)", r"\{1,2,3\}"),
    (r"\left(\frac{1}{2}, 3\right)", "(0.5, 3)"), (r"\left(\frac{1}{2}, 3\right)", "(1/2, 3)"), (r"(3, \frac{\pi}{2})", r"\left(3, \pi/2\right)"), ("(a,b)", "(a,b)"), ("(a,b)", "(b,a)"), ("(x,y)=(1,2)", "(1,2)"), ("(x,y)=(2,1)", "(2,1)"), ("x=2,y=1", "(2,1)"),
    ("[0,1]", "[0,1]"), ("[0,1]", r"\left[0,1\right]"), ("[0,1]", "[0,1)"), ("[0,1]", "[0,1.0]"), (r"[\frac{1}{2},1]", "[0.5,1]"), (r"(-\infty,3)", r"(-\infty,3)"), (r"(-\infty,3)", r"\left(-\infty, 3\right)"), (r"(-\infty,3]", r"(-\infty,3)"), (r"(-\infty,3)", "x<3"),
    (r"(-\infty,2)\cup(5,\infty)", r"(5,\infty)\cup(-\infty,2)"), (r"(-\infty,2)\cup(5,\infty)", r"(-\infty,2)\cup[5,\infty)"), (r"[0,1)\cup[1,2]", "[0,2]"), (r"(0,1)\cup(1,2)", "(0,2)"), (r"(-\infty,0)\cup(0,\infty)", r"\mathbb{R}\setminus\{0\}"), (r"\mathbb{R}", r"(-\infty,\infty)"),
    (r"\mathbb{R}", r"\mathbb{R}"), (r"\mathbb{R}", r"\mathbb{Z}"), (r"\mathbb{R}", r"\text{all real numbers}"), (r"x \in [1,2]", "[1,2]"), ("[1,2]", r"x \in [1,2]"), (r"x \in \{1,2\}", "1,2"), (r"(-2,3)\cup\{5\}", r"\{5\}\cup(-2,3)"),
    # Matrices.
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"), (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}"), (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}"),
    (r"\begin{pmatrix} 1/2 & 0 \\ 0 & 1 \end{pmatrix}", r"\begin{pmatrix} 0.5 & 0 \\ 0 & 1 \end{pmatrix}"), (r"\begin{pmatrix} 1 & 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    # What this program leaves undecided.
    (r"\int_0^1 2x dx", "1"), ("=6", r"\sum_{i=1}^{3} i"), ("=2", r"\gcd(4,6)"), ("=2", r"\max(1,2)"), (r"\{x : x > 3\}", "x > 3"), (r"(0,3)\cap(1,5)", "(1,3)"), ("x^2=4", "x^2-4=0"), ("x^2=4", r"x=\pm 2"),
]

# Solution and whole response.
TEXTS = [
    ("72", "Natalia sold 48/2 = 24 clips in May. Altogether she sold 48+24 = 72 clips.\nThe answer is \\boxed{72}."),
    ("72", "She sold 72 clips altogether."),
    ("72", "The answer is 72."),
    ("72", "The answer is $72$."),
    ("72", "The answer is: $$72$$"),
    ("72", "Answer: \\(72\\)"),
    ("72", "Answer: \\[72\\] clips"),
    ("72", "The final answer is $72$. I hope it is correct."),
    ("72", "The final answer is $73$. I hope it is correct."),
    ("72", "The final answer to this question is $72$"),
    ("72", "The answer is $71$, no, the answer is $72$."),
    ("72", "The answer is $72$, no, the answer is $71$."),
    ("72", "So we have $72$."),
    ("72", "#### 72"),
    ("72", "#### \\boxed{72}"),
    ("72", "\\boxed{71} is wrong; therefore the sum must be larger and after a long computation we arrive at the result \\boxed{72}"),
    ("72", "\\boxed{72} was my first guess; after a long computation with many steps I arrive at another one, \\boxed{71}"),
    ("72", "\\boxed{71}, \\boxed{72}"),
    ("{1,2}", "\\boxed{1} and \\boxed{2}"),
    ("$\\{1,2\\}$", "\\boxed{1} and \\boxed{2}"),
    ("$\\{1,2\\}$", "$\\boxed{1}$ and $\\boxed{2}$"),
    ("$1,2$", "The solutions are $\\boxed{1}$, $\\boxed{2}$."),
    ("72", "$$\\boxed{72}$$"),
    ("72", "\\[ x = \\boxed{72} \\]"),
    ("72", "\\[ \\boxed{x = 72} \\]"),
    ("72", "The answer is $\\boxed{72}$ and not $\\boxed{73}$."),
    ("72", "\\boxed{72"),
    ("72", "\\boxed{}"),
    ("72", "\\boxed 72"),
    ("72", "\\fbox{72}"),
    ("72", "\\boxed{\\boxed{72}}"),
    ("72", "\\boxed{\\text{72}}"),
    ("72", "boxed{72}"),
    ("72", ""),
    ("72", "\\boxed{72} \\text{ clips}"),
    ("72", "\\boxed{7}\\boxed{2}"),
    ("72", "<think>\\boxed{1}</think> The result is \\boxed{72}."),
    ("72", "The total is $\\boxed{72}$ dollars, that is $72 in all."),
    ("72", "It costs $5 and $6; the answer is \\boxed{72}."),
    ("72", "answer = $70+2$"),
    ("$\\frac{1}{3}$", "The answer is \\frac{1}{3}"),
    ("$\\frac{1}{3}$", "The probability is $\\boxed{\\dfrac{1}{3}}$."),
    ("\\frac{1}{3}", "My answer is \\boxed{\\frac{1}{3}}"),
    ("\\frac{1}{3}", "My answer is \\boxed{\\frac{1}{2}}"),
    ("The answer is $\\frac{1}{3}$.", "\\boxed{1/3}"),
    ("The answer is 42.", "\\boxed{42}"),
    ("The answer is 42.", "\\boxed{43}"),
    ("She has 3 + 4 = 7 apples.\n#### 7", "\\boxed{7}"),
    ("She has 3 + 4 = 7 apples.\n#### 7", "\\boxed{3}"),
    ("We get \\boxed{7}.", "\\boxed{7}"),
    ("First \\boxed{6}, then after all of this and a lot of further work we get the number \\boxed{7}.", "\\boxed{7}"),
    ("$x^2+1$", "\\boxed{1+x^2}"),
    ("x^2+1", "\\boxed{x^2+1}"),
    ("3x+2", "\\boxed{3}"),
    ("3x+2", "\\boxed{3x+2}"),
    ("(1,2)", "\\boxed{(1,2)}"),
    ("\\sqrt{2}", "\\boxed{\\sqrt{2}}"),
    ("Paris", "\\boxed{Paris}"),
    ("", "\\boxed{1}"),
    ("no numbers here", "\\boxed{1}"),
    ("1/2", "\\boxed{0.5}"),
    ("2 + 3", "\\boxed{5}"),
    ("2^3", "\\boxed{8}"),
    ("-7", "\\boxed{-7}"),
    ("5%", "\\boxed{5\\%}"),
    ("5 percent", "\\boxed{0.05}"),
    ("12,5", "\\boxed{12.5}"),
    ("1 234", "\\boxed{1234}"),
    (".5", "\\boxed{\\frac{1}{2}}"),
    ("**42**", "\\boxed{42}"),
    ("$42$", "\\boxed{42}"),
    ("$$42$$", "\\boxed{42}"),
    ("\\(42\\)", "\\boxed{42}"),
    ("\\[42\\]", "\\boxed{42}"),
    ("$4$ and $5$", "\\boxed{4,5}"),
    ("$4$, $5$", "\\boxed{5,4}"),
    ("\\boxed{x=3}", "\\boxed{3}"),
    ("\\boxed{3}", "\\boxed{x=3}"),
    ("\\boxed{\\frac{3}{4}}", "$\\boxed{0.75}$"),
    ("1000 m", "\\boxed{1000}"),
    ("$5", "\\boxed{5}"),
    ("5 dollars", "\\boxed{\\$5}"),
    ("€5", "\\boxed{5}"),
]


def verdict(solution, response):
    gold = parse(solution)
    if not gold:
        return None
    config = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    answer = parse(response, extraction_config=[config], extraction_mode="first_match")
    return int(verify(gold, answer))


def cases():
    for solution, content in BOXED:
        solution = solution[1:] if solution.startswith("=") else f"${solution}$"
        yield solution, f"The answer is \\boxed{{{content}}}."
    yield from TEXTS


def main():
    logging.disable(logging.CRITICAL)
    rows = [{"solution": s, "response": r, "verdict": verdict(s, r)} for s, r in cases()]
    if "--check" in sys.argv:
        from trl.rewards import accuracy_reward

        found = accuracy_reward([[{"content": row["response"]}] for row in rows], [row["solution"] for row in rows])
        assert found == [row["verdict"] for row in rows], "math-verify is called in another way than accuracy_reward does"
        return
    path = pathlib.Path(__file__).parent / "math_verify.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    counts = {str(v): sum(row["verdict"] == v for row in rows) for v in (1, 0, None)}
    print(f"{len(rows)} cases: {counts}")


if __name__ == "__main__":
    main()
