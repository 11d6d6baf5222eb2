"""Grammars in llama.cpp's notation: llguidance accepts exactly their texts, character by character."""

from __future__ import annotations

import itertools
import random
import re
import time
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo.structured_output import gbnf
from octavo.structured_output.gbnf import is_gbnf, read_rules, to_lark
from octavo.structured_output.gbnf_nodes import Chars, Choice, Node, Repeat, Rule, Rules, Sequence

llguidance = pytest.importorskip("llguidance")

ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+  # llama.cpp's own example
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<eos>": 0} | {token: i for i, token in enumerate(alphabet, start=1)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=len(alphabet) + 1, eos_token=[0])


def accepts(tokenizer: Any, grammar: str, texts: list[str]) -> list[bool]:
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(to_lark(grammar)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    found = []
    for text in texts:
        each, token_ids = matcher.deep_copy(), tokenizer.tokenize_bytes(text.encode())
        found.append(each.try_consume_tokens(token_ids) == len(token_ids) and each.is_accepting())
    return found


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= word "a"\nword ::= [a-z]+', ["ba", "aaa"], ["a", "ab"]),
        ('root ::= ("abc" | [a-z])+', ["abx", "abc", "ab"], ["", "A"]),
        (r'root ::= "\u0041bc" "\xe9" "\U0001F600"', ["Abcé😀"], ["䆼", "Abc"]),
        (r"root ::= [\u00e0-\u00ff]+", ["éü"], ["e"]),
        ("root ::= .", ["\n", "狐", "\0"], ["", "ab"]),
        ("root ::= [^]", ["\n", "]"], ["", "ab"]),
        (r"root ::= [-+a-] [a&&b] [\[\]\\] [^a\n]", ["-&]b", "+a[é", "ab\\ "], ["*&]b", "-&]a", "-&]\n"]),
        (r'root ::= "a\\b\"c[d]\[" "/" "\t"', ['a\\b"c[d][/\t'], ["ab"]),
        ('root ::= start r1\nstart ::= "1"\nr1 ::= "2"', ["12"], ["1"]),
        ('root ::= a-b  A_b\na-b ::= "1"\nA_b ::= "2"', ["12"], ["21"]),
        ('root ::= "x"{2} "y"{1,} "z"{0,2} ("ab" | "c")? "d"*', ["xxy", "xxyyzzabdd"], ["xy", "xxyzzz", "xxyabc"]),
        ('root ::= "ab"+', ["ab", "abab"], ["abb", ""]),
        ('root ::= |"a"|("b"|)"c"', ["", "a", "c", "bc"], ["b"]),
        ('root ::= "a" root "b" | "ab"', ["ab", "aabb"], ["aab", ""]),
        ('root ::= "a" # a comment with "quotes"\n  | "b"  # another\n', ["a", "b"], ["ab"]),
        (ARITHMETIC, ["a+1=2 \n", "(x)*y1=3\nb=c\n"], ["a+1=2", "a + 1=2\n"]),
        (JSON, ['{"a": [1, -2.5e+1, {"狐\\u00e9": null}]}\n', "{}"], ['{"a"}', '{"a\n": 1}', "[]"]),
    ],
)
def test_gbnf_grammar_accepts_exactly_its_texts(tokenizer: Any, grammar: str, good: list[str], bad: list[str]) -> None:
    assert is_gbnf(grammar)
    assert accepts(tokenizer, grammar, good) == [True] * len(good)
    assert accepts(tokenizer, grammar, bad) == [False] * len(bad)


@pytest.mark.turn(12)
def test_random_gbnf_grammars_match_equivalent_regular_expressions(tokenizer: Any) -> None:
    rng = random.Random(7)
    texts = ["".join(each) for length in range(5) for each in itertools.product("ab\n", repeat=length)]
    for _ in range(150):
        rules: dict[str, str] = {}
        gbnf, expression = draw(rng, 3, rules)
        grammar = "\n".join([f"root ::= {gbnf}", *(f"{name} ::= {body}" for name, body in rules.items())])
        expected = [re.fullmatch(expression, text) is not None for text in texts]
        assert accepts(tokenizer, grammar, texts) == expected, grammar


def draw(rng: random.Random, depth: int, rules: dict[str, str]) -> tuple[str, str]:
    """Return a random expression in GBNF and as a regular expression. Some of its parts become rules."""
    kind = rng.randrange(7) if depth else rng.randrange(2)
    if kind == 0:
        text = "".join(rng.choice("ab\n") for _ in range(rng.randint(1, 3)))
        return '"' + text.replace("\n", "\\n") + '"', re.escape(text)
    if kind == 1:
        return rng.choice([("[ab]", "[ab]"), ("[^a]", "[^a]"), (".", "[^\0]"), ("[a-b]", "[a-b]"), ('""', "")])
    left, right = draw(rng, depth - 1, rules), draw(rng, depth - 1, rules)
    if kind == 2:
        name = f"rule{len(rules)}"
        rules[name] = left[0]
        return name, left[1]
    if kind == 3:
        return f"({left[0]}) | ({right[0]})", f"(?:{left[1]}|{right[1]})"
    if kind == 4:
        how = rng.choice(["*", "+", "?", "{2}", "{1,2}", "{1,}"])
        return f"({left[0]}){how}", f"(?:{left[1]}){how}"
    return f"({left[0]}) ({right[0]})", f"(?:{left[1]})(?:{right[1]})"


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('"a"', "must begin with a rule"),
        ('a ::= "a"', "'root' is not defined"),
        ("root ::= a", "'a' is not defined"),
        ('root ::= "a"\nroot ::= "b"', "defined twice"),
        ('root ::= ("a"', "not closed"),
        ('root ::= "a")', "has no opening one"),
        ("root ::= *", "nothing to repeat"),
        ('root ::= "a"**', "nothing to repeat"),
        ('root ::= "a"{0}', "repeats zero times"),
        ("root ::= [b-a]", "in reverse order"),
        ("root ::= []", "empty"),
        (r'root ::= "\q"', "not a valid escape"),
        (r'root ::= "\ud83d"', "not a character"),
        (r'root ::= "\U00110000"', "not a character"),
        ('root ::= "a', "line 1 cannot be read"),
        ('root ::= "a"\nb ::= <think>', "line 2 cannot be read"),
    ],
)
def test_invalid_gbnf_raises_error_with_cause(grammar: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        to_lark(grammar)


@pytest.mark.parametrize(
    "grammar", ['start: "a"', "start: A\nA: /a+/", 'start: "a" // b ::= c', '%llguidance {}\nstart: "::="']
)
def test_lark_grammar_is_not_detected_as_gbnf(grammar: str) -> None:
    assert not is_gbnf(grammar)


@pytest.mark.turn(12)
def test_deeply_nested_gbnf_grammar_is_converted() -> None:
    deep = "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000
    assert to_lark(deep) == to_lark('root ::= "a"')
    assert len(to_lark(deep.replace("(", '("b" '))) > 60_000


# --- lexemes of several characters


def ends(node: Node, rules: Rules, text: str, place: int) -> set[int]:
    """Return the possible ends of a part that begins at `place`: an independent matcher for the notation."""
    match node:
        case Chars(ranges):
            fits = place < len(text) and any(first <= ord(text[place]) <= last for first, last in ranges)
            return {place + 1} if fits else set()
        case Sequence(items):
            places = {place}
            for item in items:
                places = {end for each in places for end in ends(item, rules, text, each)}
            return places
        case Choice(options):
            return {end for option in options for end in ends(option, rules, text, place)}
        case Rule(name):
            return ends(rules[name], rules, text, place)
        case Repeat(item, least, most):
            found, places, count = ({place} if not least else set()), {place}, 0
            while places and count != most:
                count += 1
                new = {end for each in places for end in ends(item, rules, text, each)}
                places = new - found if count >= least else new
                found |= new if count >= least else set()
            return found
    raise AssertionError(node)


PARTS = ['"ab"', '"cd"', '"abc"', '"q" [^q]* "q"', '"q" ([^q] | "q" "q")* "q"', "[a]", '"d"+', '","', '"," "q"? ","']
PIECES = ["ab", "cd", "abc", "qaq", "qq", "q", "a", "b", "c", "d", ",", "x", ",,"]


def draw_recursive(rng: random.Random, parts: list[str], depth: int, *, is_guarded: bool) -> str:
    """Return a random expression. Rules in it follow a character, so that none begins with itself."""
    kind = rng.randrange(7) if depth else rng.randrange(2)
    if kind == 0 or (kind == 1 and not is_guarded):
        return rng.choice(parts)
    if kind == 1:
        return rng.choice(["root", "r", "s"])
    left = draw_recursive(rng, parts, depth - 1, is_guarded=is_guarded)
    if kind == 2:
        return f"({left}) | {draw_recursive(rng, parts, depth - 1, is_guarded=is_guarded)}"
    if kind == 3:
        return f"({left}){rng.choice(['*', '+', '?', '{2}', '{1,2}'])}"
    return f"{rng.choice(parts)} ({left}) ({draw_recursive(rng, parts, depth - 1, is_guarded=True)})"


def num_consumed(tokenizer: Any, lark: str, texts: list[str]) -> list[int]:
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return [matcher.deep_copy().try_consume_tokens(tokenizer.tokenize_bytes(text.encode())) for text in texts]


@pytest.mark.turn(12)
def test_lexemes_do_not_change_texts_that_recursive_grammars_accept(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An independent matcher agrees, and each text is accepted as far as without lexemes."""
    rng = random.Random(3)
    num_with_lexemes = num_accepted = 0
    for _ in range(100):
        parts = rng.sample(PARTS, 3)
        bodies = {name: draw_recursive(rng, parts, 3, is_guarded=False) for name in ("root", "r", "s")}
        grammar = "\n".join(f"{name} ::= {body}" for name, body in bodies.items())
        rules, lark = read_rules(grammar), to_lark(grammar)
        num_with_lexemes += "\nT" in lark and not lark.startswith("start: T0")
        texts = ["".join(rng.choices(PIECES, k=rng.randrange(6))) for _ in range(60)]
        expected = [len(text) in ends(rules["root"], rules, text, 0) for text in texts]
        num_accepted += sum(expected)
        assert accepts(tokenizer, grammar, texts) == expected, grammar
        with monkeypatch.context() as patch:
            patch.setattr(gbnf, "with_lexemes", lambda rules: rules)
            by_chars = to_lark.__wrapped__(grammar)
        assert num_consumed(tokenizer, lark, texts) == num_consumed(tokenizer, by_chars, texts), grammar
    assert num_with_lexemes > 10
    assert num_accepted > 100


@pytest.mark.parametrize(
    ("grammar", "lexemes"),
    [
        ('root ::= "a" root? | "b" ("c" "d")*', 1),
        ('root ::= "a" root? | "b" ("c" "d")* "c"', 0),
        ('root ::= "[" root* "]" | "ab"', 1),  # no other part begins with a
        ('root ::= "[" root* "]" | "ab" | [a]', 0),
        ('root ::= "[" root* "]" | "\\"" [^"]* "\\"" " "?', 1),
        ('root ::= "[" root* "]" | "ab" | "abc"', 1),  # the shorter one, if it is no other part's beginning
        (ARITHMETIC, 0),
        (JSON, 3),  # strings, the three names, exponents
    ],
)
def test_recursive_grammar_has_expected_number_of_lexemes(grammar: str, lexemes: int) -> None:
    assert len(re.findall("^T", to_lark(grammar), re.MULTILINE)) == lexemes, to_lark(grammar)


@pytest.mark.turn(8)
def test_complex_recursive_grammar_converts_quickly_without_lexemes() -> None:
    for part in ("[ab]*", '"ab" [a]*'):
        grammar = "root ::= " + " ".join([part] * 1500) + ' root "c" | "d"'
        started = time.process_time()
        assert "\nT" not in to_lark(grammar)
        assert time.process_time() - started < 5
