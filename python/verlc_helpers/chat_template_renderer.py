"""Renders chat templates as transformers' apply_chat_template does.

init:    {"template", "tool_template", "special": {"bos_token": ..., ...}, "date": 20250131}; templates that ask
         for the time get noon of "date"
request: {"messages", "add_generation_prompt", "tools", "documents",
          "continue_final_message", "chat_template", ...}; other keys become
          variables of the template
reply:   the rendered text
request: {"common": {...}, "many": [request, ...]}: each over the keys of common
reply:   the texts, up to the first request that fails, or to some MiB of them
request: {"constants": bool}: those of the template, true: of that for tools
reply:   its text constants

By hand: python3 -m verlc_helpers.chat_template_renderer '{"template": "..."}' < requests.jsonl

Templates come with models and are not trusted: they run in Jinja2's sandbox, see
JSON values only, and cannot change what they are given.
"""

import json
from datetime import datetime

from verlc_helpers.protocol import HelperError, install_line, serve

try:
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError as error:
    jinja2 = None
    missing = str(error)
    ImmutableSandboxedEnvironment = object

# The names under which a message's reasoning is passed; templates read the first.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
PIECE = 8 << 20  # characters of a reply of several texts
TAG = "CONTINUE_FINAL_MESSAGE_TAG "

state = {"compiled": {}}


def init(value):
    state.update(value or {})


# ---- the environment ---------------------------------------------------------

def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Jinja's own escapes HTML; a prompt must not."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(fmt):
    date = state.get("date")
    now = datetime.now() if date is None else datetime(date // 10000, date // 100 % 100, date % 100, 12)
    return now.strftime(fmt)


class TemplateDict:
    """dict(...) without the attributes of the type."""

    def __call__(self, *args, **kwargs):
        return dict(*args, **kwargs)

    def fromkeys(self, *args, **kwargs):
        return dict.fromkeys(*args, **kwargs)


def make_environment():
    class Generation(jinja2.ext.Extension):
        """{% generation %} ... {% endgeneration %}: marks what the assistant wrote;
        for rendering it is its content."""
        tags = {"generation"}

        def parse(self, parser):
            lineno = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(lineno)

        def _content(self, caller):
            return caller()

    class TemplateNamespace(jinja2.utils.Namespace):
        """Without names that start with an underscore, which could reach the interpreter."""

        def __init__(*args, **kwargs):  # so that namespace(self=...) works
            self, args = args[0], args[1:]
            attrs = dict(*args, **kwargs)
            for name in attrs:
                TemplateNamespace.check_name(name)
            jinja2.utils.Namespace.__init__(self, attrs)

        def __setitem__(self, name, value):
            TemplateNamespace.check_name(name)
            jinja2.utils.Namespace.__setitem__(self, name, value)

        @staticmethod
        def check_name(name):
            if isinstance(name, str) and name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                        extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals.update(raise_exception=raise_exception, strftime_now=strftime_now, dict=TemplateDict(),
                       namespace=TemplateNamespace)
    return env


def compiled(text):
    """The template's compiled form; compiled once."""
    if jinja2 is None:
        raise HelperError(f"chat templates need Jinja2 3.1.6 or newer ({missing}); {install_line('jinja2')}", "HELPER")
    known = state["compiled"]
    if text not in known:
        if "env" not in state:
            state["env"] = make_environment()
        if len(known) > 64:
            known.clear()
        known[text] = state["env"].from_string(text)
    return known[text]


# ---- messages ----------------------------------------------------------------

def prepare(messages):
    """A copy without null values, and with reasoning under both names that templates read."""
    if not isinstance(messages, list) or not messages:
        raise HelperError("\"messages\" must be a list with at least one message")
    out = []
    for message in messages:
        if not isinstance(message, dict):
            raise HelperError("each message must be an object with \"role\" and \"content\"")
        message = {k: v for k, v in message.items() if v is not None}
        reasoning = next((message[k] for k in REASONING_FIELDS if k in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        out.append(message)
    return out


def tag_final(messages, field, template):
    """Marks the end of the text that is to be continued; returns that text."""
    last = messages[-1]
    final = last.get(field)
    if final is None:
        raise HelperError(f"continue_final_message: the last message has no {field!r} to continue")
    fields = [field]
    if field in REASONING_FIELDS:
        fields = [f for f in REASONING_FIELDS if last.get(f) == final]
    if not any(f in template for f in fields):
        raise HelperError(f"continue_final_message: the chat template does not read {field!r}")
    if isinstance(final, list):
        for block in reversed(final):
            if "text" in block:
                final = block["text"]
                block["text"] += TAG
                return final
        raise HelperError("continue_final_message: the last message has no text to continue")
    for f in fields:
        last[f] = last[f] + TAG
    return final


def cut_after_final(text, final):
    if final.strip() not in text or TAG.strip() not in text:
        raise HelperError("continue_final_message: the template does not show the last message as it is")
    at = text.rindex(TAG.strip())
    if text[at:at + len(TAG)] == TAG:
        return text[:at]
    return text[:at].rstrip()  # the template trimmed the message


def render_many(request):
    common, texts, size = request.get("common") or {}, [], 0
    for each in request["many"]:
        if size > PIECE:
            break  # verlc requests the rest
        try:
            texts.append(render({**common, **each}))
            size += len(texts[-1])
        except HelperError:
            break  # requested alone next, and then it is reported
    return texts


def written(node):
    """The constants that an output writes as they are: 'a' ~ x + 'b'."""
    if isinstance(node, jinja2.nodes.Const):
        yield node
    elif isinstance(node, (jinja2.nodes.Output, jinja2.nodes.Concat, jinja2.nodes.Add)):
        for child in node.iter_child_nodes():
            yield from written(child)


def constants(with_tools):
    """The texts that the template may compare a message's text with."""
    text = (state.get("tool_template") if with_tools else None) or state.get("template")
    if text is None:
        return []
    compiled(text)  # a broken template is reported by it
    tree, nodes = state["env"].parse(text), jinja2.nodes
    passed = {id(c) for output in tree.find_all(nodes.Output) for c in written(output)}
    passed |= {id(n.arg) for n in tree.find_all(nodes.Getitem)}
    return sorted({n.value for n in tree.find_all(nodes.Const) if isinstance(n.value, str) and id(n) not in passed})


def handle(request):
    if not isinstance(request, dict):
        raise HelperError("a request must be an object with \"messages\"")
    if "constants" in request:
        return constants(request["constants"])
    return render_many(request) if "many" in request else render(request)


def render(request):
    variables = dict(request)
    messages = prepare(variables.pop("messages", None))
    tools = variables.pop("tools", None)
    documents = variables.pop("documents", None)
    for name, value in (("tools", tools), ("documents", documents)):
        if value is not None and not (isinstance(value, list) and all(isinstance(v, dict) for v in value)):
            raise HelperError(f"\"{name}\" must be a list of objects")
    add_prompt = bool(variables.pop("add_generation_prompt", False))
    continued = variables.pop("continue_final_message", False)
    template = variables.pop("chat_template", None)
    if template is None:
        template = state.get("tool_template") if tools is not None else None
        template = template or state.get("template")
    if template is None:
        raise HelperError("the model has several chat templates and none named default")
    final = None
    if continued:
        if add_prompt:
            raise HelperError("continue_final_message and add_generation_prompt exclude each other")
        messages = json.loads(json.dumps(messages))  # the request itself stays as it came
        final = tag_final(messages, continued if isinstance(continued, str) else "content", template)
    try:
        program = compiled(template)
        text = program.render(messages=messages, tools=tools, documents=documents,
                              add_generation_prompt=add_prompt, **{**(state.get("special") or {}), **variables})
    except HelperError:
        raise
    except Exception as error:  # whatever a template does wrong is the template's error
        raise HelperError(f"chat template: {type(error).__name__}: {error}")
    return text if final is None else cut_after_final(text, final)


if __name__ == "__main__":
    serve(handle, init, own_code=True)
