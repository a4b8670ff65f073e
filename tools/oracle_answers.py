"""Generated responses for tools/oracle_graders.py: the same answers written in many ways, right and wrong, in responses of
many forms. Everything is drawn from the generator that is passed in.
"""
import random

UNITS = ["", "", "", " cm", r"\text{ cm}", r"\text{ square meters}", " miles", " dollars", "%", r"\%", r"^\circ", r"^{\circ}",
         " degrees",
         " hours", " inches", r"\,\text{cm}^2", " liters", " feet^2", " years old", " students", r"\text{m}", r"\mbox{ km}"]
SPACES = ["", "", "", " ", "\n", "\u2003", "\u00a0", "\t", "\x1c", "\u3000"]
WORDS = ["Paris", "the Eiffel Tower", "An Apple", "New York City", "İstanbul", "ΟΔΥΣΣΕΥΣ", "naïve café", "東京", "U.S. Navy", "A",
         "the a an", "AC/DC", "Σ", "straße", "O'Neill", "42", "the_one", "a-b c", "no", "yes", "٣ cats", "“quoted”", "x²", ""]
LETTERS = "ABCD"


def digits(rng, n):
    """The number in digits of some script."""
    zero = rng.choice([0x30] * 12 + [0x660, 0xFF10, 0x966])
    return "".join(chr(zero + int(c)) if c.isdigit() else c for c in str(n))


def fraction(rng, a, b):
    return rng.choice([f"\\frac{{{a}}}{{{b}}}", f"\\dfrac{{{a}}}{{{b}}}", f"\\tfrac{{{a}}}{{{b}}}", f"{a}/{b}", f"\\frac{a}{b}",
                       f"\\frac{a}{{{b}}}", f"({a})/({b})", f"{a} / {b}", f"\\frac {{{a}}} {{{b}}}", str(a / b), f"{a / b:.4f}",
                       f"\\left(\\frac{{{a}}}{{{b}}}\\right)", f"{a}\\div{b}", f"-\\frac{{{-a}}}{{{b}}}"])


def number(rng, n):
    return rng.choice([str(n), str(n), f"{n:,}", f"{n}.0", f"{n}.", f"+{n}", f"{n}.00", f"\\${n}", f"${n}$", f"{{{n}}}",
                       f"\\text{{{n}}}",
                       f"{n:,}".replace(",", "{,}"), f"{n:,}".replace(",", ",\\!"), digits(rng, n), f"0{n}", f"- {n}", f"{n}_8",
                       f"{n}e0",
                       f"{n}_{{10}}", f"x={n}", f"k = {n}", f"\\mathbf{{{n}}}", f"{n} million", f"\\boxed{{{n}}}", f"1_0{n}",
                       f"{n}\\pm 0"]) + rng.choice(UNITS)


def value(rng):
    """A function that writes one value in some way."""
    a, b, c = rng.randint(-20, 2000), rng.randint(2, 13), rng.randint(1, 9)
    forms = [
        lambda: number(rng, a), lambda: number(rng, a), lambda: number(rng, c), lambda: fraction(rng, a % 17 + 1, b),
        lambda: rng.choice([f"{c}\\frac{{1}}{{{b}}}", f"{c} 1/{b}", f"{c}\\tfrac1{b}", f"{c} \\frac{{1}}{{{b}}}",
                            fraction(rng, c * b + 1, b)]),
        lambda: rng.choice([f"{c}\\sqrt{{{b}}}", f"{c}\\sqrt{b}", f"{c}*sqrt({b})", f"\\sqrt{{{c * c * b}}}",
                            f"{c} \\sqrt {{{b}}}"]),
        lambda: rng.choice([f"{c}\\pi", f"{c} \\pi", f"{c}π", f"{c * 3.14:.2f}", f"{c}*\\pi", f"\\pi*{c}", f"{c}\\pi/1",
                            f"{c * 3.14159265:.6f}",
                            f"\\frac{{{c}\\pi}}{{1}}", f"({c}\\pi, 1)", f"\\pi\\cdot{c}"]),
        lambda: rng.choice([f"({a}, {b})", f"({a},{b})", f"\\left( {a}, {b} \\right)", f"[{a}, {b}]", f"({a}, {b}.0)",
                            f"( {a} ,{b})", f"{a}, {b}",
                            f"Point({a}, {b})", f"({b}, {a})", f"{{{a}, {b}}}"]),
        lambda: rng.choice([f"[{c},\\infty)", f"[{c}, \\infty)", f"({c}, \\infty)", f"Interval({c}, oo)",
                            f"Interval.Ropen({c}, {b})", f"[{c}, {b})",
                            f"Interval.open({c}, {b})", f"({c}, {b})", f"Interval.Lopen({c}, {b})", f"({c}, {b}]"]),
        lambda: rng.choice([f"x^2+{c}x", f"{c}x+x^2", f"x(x+{c})", f"x^{{2}}+{c}x", f"x*(x+{c})", f"y^2+{c}y", f"x^12+{c}",
                            f"(x+{c})^2 - {c * c} - {c}x"]),
        lambda: rng.choice([f"\\begin{{pmatrix}} {c} \\\\ {b} \\end{{pmatrix}}", f"\\begin{{pmatrix}}{c}\\\\{b}\\end{{pmatrix}}",
                            f"({c}, {b})",
                            f"Matrix([[{c}], [{b}]])"]),
        lambda: rng.choice([f"{c}\\%", f"{c}%", f"{c / 100}", f"{c}", f"0.0{c}", f".0{c}"]),
        lambda: rng.choice(["\\text{even}", "even", "Even", "\\text{ even }", "EVEN", "\\textbf{even}", "$\\text{even}$"]),
        lambda: rng.choice(WORDS),
        lambda: rng.choice([f"{c} \\text{{ or }} {b}", f"{c} or {b}", f"{c}, {b}", f"{c} and {b}", f"x={c}, y={b}",
                            f"x = {c} or x = {b}"]),
        lambda: rng.choice(["\\emptyset", "∅", "", "None", "\\boxed", "\\frac", "\\sqrt", "^", "{", "}", "$", "()", "[", "nan",
                            "inf", "1/0", "\\pi", "_", "\\\\"]),
        lambda: rng.choice([f"{c}^\\circ", f"{c}^{{\\circ}}", f"{c}^ \\circ", f"{c}°", f"{c} degrees", f"{c}"]),
    ]
    return rng.choice(forms)


def wrapped(rng, answer, filler):
    """A response that ends with the answer, in one of the forms that some grader reads, or almost."""
    return rng.choice([
        "\\boxed{%s}", "$\\boxed{%s}$.", "The answer is %s", "The answer is $%s$.", "Answer: %s", "answer : %s\n",
                       "**Answer:** %s", "#### %s",
        "####%s", "\\boxed{%s", "\\boxed{\\boxed{%s}}", "\\fbox{%s}", "\\boxed %s$ ok",
                       "Step 1: 2+2=4. Step 2: so it is \\boxed{%s}",
        "Therefore %s is the answer", "%s are the answers", "x = %s", "So we get %s. ", "The value must be %s",
                       "THE ANSWER IS: %s.", "%s",
        "<think>\nhm\n</think>\n\\boxed{%s}", "<think>hm</think> so \\boxed{%s} done", "<think>hm \\boxed{%s}",
                       "\\boxed{7} no, \\boxed{%s}",
        "\\boxed{%s} or \\boxed{}", "\\boxed{%s}. Hence it is so. ", "\\boxed{%s} = 3", "\\boxed{ %s }", "\\boxed\n{%s}",
                       "an\u017fwer: %s",
        "İİ the answer is %s", "Final Answer: The final answer is $%s$. I hope it is correct.", "answers are\n%s\n", "= %s = ",
                       "it is\n%s",
    ]).replace("%s", rng.choice(SPACES) + answer + rng.choice(SPACES)) + filler


def response(rng, answer):
    lead = rng.choice(["", "", "", "So 3 * 4 = 12.\n", "Let x be it. Then x = 5.\n", "日本語 12 \n", "é" * 290, "x" * 250,
                       "We compute 1 + 2 = 3. " * rng.choice([3, 30, 450]), "{" * 5, "\\boxed{1} ", "Answer: 1\n", "#### 5\n"])
    tail = rng.choice(["", "", "", "", "\n", ".", " ", "z" * 90, "ü" * 295, "}", "\n\n\u2003", " \\boxed{", " Answer:",
                       "\nAnswer: 2"])
    text = lead + wrapped(rng, answer, tail)
    return text[: rng.randint(0, len(text))] if rng.random() < 0.03 else text


def math_pairs(rng, n):
    """(response, gold): about half of them are of the gold's value."""
    for _ in range(n):
        write = value(rng)
        gold = write()
        yield response(rng, write() if rng.random() < 0.7 else value(rng)()), gold


def normal_word(rng, word):
    return rng.choice([word, word.upper(), word.lower(), "the " + word, word + ".", "a  " + word, word.replace(" ", "\u2003"),
                       word + "!?", "An " + word,
                       word.swapcase(), word + " the", word.title(), f"«{word}»", word + "\u0307", word[:-1]])


def search_pairs(rng, n):
    """(response, {"target": ...}) with <answer> tags in all states."""
    for _ in range(n):
        golds = [rng.choice(WORDS) for _ in range(rng.randint(1, 3))]
        said = normal_word(rng, rng.choice(golds + [rng.choice(WORDS)]))
        form = rng.choice(["<answer>%s</answer>"] * 6 + ["<answer>\n%s\n</answer> ok", "<answer>%s", "%s</answer>",
                                                         "<answer>x</answer><answer>%s</answer>",
                           "<answer><answer>%s</answer></answer>", "<ANSWER>%s</ANSWER>", "<answer></answer>%s",
                                                         "<answer>no</answer>" * 11 + "<answer>%s</answer>",
                           "</answer>" * 12 + "<answer>%s</answer>", "It is %s.", "<answer>it is %s, I think</answer>",
                                                         "<answer>" * 11 + "%s</answer>"])
        yield rng.choice(["", "<think>hm</think>\n", "y" * 10000, "\u2003"]) + form.replace("%s", said), {
            "target": golds[0] if rng.random() < 0.3 else golds}


def choice_pairs(rng, n):
    for _ in range(n):
        gold = rng.choice(LETTERS)
        said = rng.choice([gold, gold, rng.choice(LETTERS), gold.lower(), "E", f"({gold})", f"${gold}$", f"${gold}", f"**{gold}**",
                           f"{gold}) x"])
        text = rng.choice(["Answer: %s", "answer:%s", "ANSWER \t:\t%s", "an\u017fwer: %s", "Answer:\u00a0%s", "Answer:\n%s",
                           "The answer is %s", "Answer: E Answer: %s",
                           "Answer: %s\nAnswer: A", "x" * 9000 + "Answer: %s", "\\boxed{%s}", "Final Answer: $%s$",
                           "**Answer: %s**", "Answers: %s"])
        yield text.replace("%s", said), gold


def gsm8k_pairs(rng, n, solutions):
    """Worked solutions of GSM8K (where there are any) whose final line is written in other ways."""
    for _ in range(n):
        gold = str(rng.randint(-50, 5000))
        body = "They pay 3 * 4 = <<3*4=12>>12 dollars.\n"
        if solutions:
            body, _, gold = rng.choice(solutions).rpartition("#### ")
            gold = gold.strip().replace(",", "")
        said = rng.choice([gold] * 4 + [number(rng, int(float(gold))), str(int(float(gold)) + 1), gold + ".", "$" + gold])
        yield body + rng.choice(["#### %s", "#### %s", "#### %s.", "####%s", "The answer is %s.", "#### %s\n#### 5", "#### $%s",
                                 "\\boxed{%s}",
                                 "#### %s" + "z" * rng.choice([280, 296, 310])]).replace("%s", said), gold


if __name__ == "__main__":
    for text, gold in math_pairs(random.Random(0), 10):
        print(repr(text[-100:]), "|", repr(gold))
