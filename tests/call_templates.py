"""Chat templates of models, and short ones that write calls of tools as whole families of models do."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent / "fixtures" / "templates"
QWEN3, GPT_OSS = ((_FOLDER / f"{name}.jinja").read_text(encoding="utf-8") for name in ("qwen3", "gpt-oss"))

MISTRAL = (  # a list behind a control token; ids of 9 letters, which past calls show behind their arguments
    "{% set ns = namespace(user=true) %}{% for m in messages if m.role != 'tool' and not m.tool_calls is defined %}"
    "{% if (m.role == 'user') != ns.user %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.user = not ns.user %}{% endfor %}"
    "{{ bos_token }}{% if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% elif m.tool_calls is defined %}{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}"
    "{% set out = c.function | tojson %}{{ out[:-1] + ', \"id\": \"' + c.id + '\"}' }}"
    "{{ ', ' if not loop.last else ']' + eos_token }}{% endfor %}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% elif m.role == 'tool' %}"
    "{{ '[TOOL_RESULTS] {\"content\": ' + m.content + ', \"call_id\": \"' + m.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{% endif %}{% endfor %}"
)

MISTRAL_ARGS = (  # a control token before each name, and another one before the arguments
    "{{ bos_token }}{% if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{% set a = c.function.arguments %}"
    "{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' + (a if a is string else a | tojson) }}"
    "{% endfor %}{{ eos_token }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}{% endif %}{% endfor %}"
)

MISTRAL_IDS = MISTRAL_ARGS.replace("'[ARGS]'", "'[CALL_ID]' + c.id + '[ARGS]'")  # an id in the call itself

LLAMA = (  # JSON without a marker, and no more than one call in an answer
    "{{ bos_token }}{% if tools %}{{ '<|start_header_id|>system<|end_header_id|>\n\n' }}"
    "{{ tools | tojson + '<|eot_id|>' }}{% endif %}{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set c = m.tool_calls[0].function %}"
    '{{ \'<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "\' + c.name + \'", "parameters": \' }}'
    "{{ c.arguments | tojson + '}<|eot_id|>' }}"
    "{% else %}{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}"
    "{{ (m.content | tojson if m.role == 'tool' else m.content | trim) + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

HERMES = (  # tags, with line ends around every call
    "{{ bos_token }}{% if tools %}{{ '<|im_start|>system\n<tools>' + tools | tojson }}"
    "{{ '</tools><|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls is defined %}"
    "{{ '<|im_start|>assistant\n' }}{% for c in m.tool_calls %}"
    '{{ \'<tool_call>\n{"name": "\' + c.function.name }}'
    "{{ '\", \"arguments\": ' + c.function.arguments | tojson + '}\n</tool_call>' }}"
    "{{ '\n' if not loop.last }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}{{ '<|im_start|>tool\n<tool_response>\n' + m.content }}"
    "{{ '\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TEXT_ARGUMENTS = MISTRAL_ARGS.replace("(a if a is string else a | tojson)", "a")  # takes arguments as text alone

NO_TOOLS = (
    "{% for m in messages %}{{ '<s>' + m.role + '\n' + m.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)

XML = (  # calls that are not JSON
    "{{ tools | tojson }}{% for m in messages %}{{ '<s>' + m.content }}{% for c in m.tool_calls or [] %}"
    "{% for k, v in c.function.arguments.items() %}{{ '<' + k + '>' + v | string }}{% endfor %}{% endfor %}{% endfor %}"
)

# Values between quotes of the template's own, reasoning in a channel, which is removed from earlier answers, and
# results that continue the turn of the calls.
_GEMMA_VALUES = (
    "{% macro value(x) %}{% if x is string %}{{ '<|\"|>' + x + '<|\"|>' }}{% elif x is none %}null"
    "{% elif x is boolean %}{{ 'true' if x else 'false' }}{% elif x is mapping %}{{ '{' }}{{ fields(x) }}{{ '}' }}"
    "{% elif x is sequence %}[{% for e in x %}{{ ',' if not loop.first }}{{ value(e) }}{% endfor %}]"
    "{% else %}{{ x }}{% endif %}{% endmacro %}"
    "{% macro fields(x) %}{% for k, v in x | dictsort %}{{ ',' if not loop.first }}{{ k }}:{{ value(v) }}"
    "{% endfor %}{% endmacro %}"
    "{% macro said(x) %}{% set ns = namespace(text='') %}{% for part in x.split('<channel|>') %}"
    "{% set ns.text = ns.text + part.split('<|channel>')[0] %}{% endfor %}{{ ns.text | trim }}{% endmacro %}"
    "{% macro call(c) %}{{ '<|tool_call>call:' + c.function.name + '{' }}{% set a = c.function.arguments %}"
    "{% if a is mapping %}{{ fields(a) }}{% else %}{{ a }}{% endif %}{{ '}<tool_call|>' }}{% endmacro %}"
    "{% macro result(name, x) %}{{ '<|tool_response>response:' + name + '{' }}"
    "{{ fields(x) if x is mapping else 'value:' + value(x) }}{{ '}<tool_response|>' }}{% endmacro %}"
    "{{ bos_token }}{% set system = messages[0].role == 'system' %}{% set thinks = enable_thinking | default(false) %}"
    "{% if thinks or tools or system %}{{ '<|turn>system\n' }}{{ '<|think|>\n' if thinks }}"
    "{{ messages[0].content | trim if system }}{% for t in tools or [] %}"
    "{{ '<|tool>declaration:' + t.function.name + '{description:' + value(t.function.description or '') + '}<tool|>' }}"
    "{% endfor %}{{ '<turn|>\n' }}{% endif %}{% set shown = messages[1:] if system else messages %}"
)

GEMMA = _GEMMA_VALUES + (
    "{% set ns = namespace(last=-1, before='', kind='') %}"
    "{% for m in shown %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in shown %}{% if m.role != 'tool' %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{% set ns.kind = '' %}{% set then = namespace(results=m.tool_responses or [], role='') %}"
    "{% for f in shown[loop.index:] if not then.role %}{% if f.role != 'tool' %}{% set then.role = f.role %}"
    "{% elif m.tool_calls and not m.tool_responses %}"
    "{% set then.results = then.results + [{'name': f.name, 'response': f.content}] %}{% endif %}{% endfor %}"
    "{% if not (role == 'model' and ns.before == 'assistant') %}{{ '<|turn>' + role + '\n' }}{% endif %}"
    "{% if m.reasoning_content and loop.index0 > ns.last %}"
    "{{ '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ call(c) }}{% set ns.kind = 'call' %}{% endfor %}"
    "{% for r in then.results %}{{ result(r.name, r.response) }}{% set ns.kind = 'result' %}{% endfor %}"
    "{% set text = said(m.content or '') if role == 'model' else m.content | trim %}{{ text }}"
    "{% if ns.kind == 'call' %}{{ '<|tool_response>' }}{% elif role == 'model' and then.role == 'assistant' %}"
    "{% elif not (then.results and not text and not then.role) %}{{ '<turn|>\n' }}{% endif %}"
    "{% set ns.before = m.role %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{% if not ns.kind %}{{ '<|turn>model\n' }}"
    "{% elif ns.kind == 'result' and thinks %}{{ '<|channel>thought\n' }}{% endif %}{% endif %}"
)

GEMMA_OF_APRIL = _GEMMA_VALUES + (  # the first one, which ends a turn after its calls, and opens one after results
    "{% set ns = namespace(kind='') %}{% for m in shown %}{% set ns.kind = '' %}"
    "{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{% for c in m.tool_calls or [] %}{{ call(c) }}{% endfor %}"
    "{% for r in m.tool_responses or [] %}{{ result(r.name, r.response) }}{% set ns.kind = 'result' %}{% endfor %}"
    "{{ said(m.content or '') if m.role == 'assistant' else m.content | trim }}"
    "{% if not (m.tool_responses and not m.content) %}{{ '<turn|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{% if ns.kind != 'result' %}{{ '<|turn>model\n' }}{% endif %}"
    "{% if not thinks %}{{ '<|channel>thought\n<channel|>' }}{% endif %}{% endif %}"
)

# Calls whose arguments are no object: tags around names and values, and calls as in Python. Strings in tags stand as
# they are.
_TURNS = (
    "{{ bos_token }}{% if tools %}{{ '<|im_start|>system\nTools: ' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}"
    "{{ '<tool_response>' + m.content + '</tool_response>' if m.role == 'tool' else m.content or '' }}"
)
_TURNS_END = "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

PARAMETER_TAGS = (  # words as in Python, behind an empty line where there is text
    _TURNS + "{% for c in m.tool_calls or [] %}{{ '\n\n' if loop.first and m.content else '\n' if not loop.first }}"
    "{{ '<tool_call>\n<function=' + c.function.name + '>\n' }}{% for k, v in c.function.arguments.items() %}"
    "{{ '<parameter=' + k + '>\n' }}{{ v | tojson if v is mapping or (v is sequence and v is not string) else v }}"
    "{{ '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}{% endfor %}" + _TURNS_END
)

KEY_TAGS = (
    _TURNS + "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>' + c.function.name + '\n' }}"
    "{% for k, v in c.function.arguments.items() %}{{ '<arg_key>' + k + '</arg_key>\n<arg_value>' }}"
    "{{ v if v is string else v | tojson }}{{ '</arg_value>\n' }}{% endfor %}{{ '</tool_call>' }}{% endfor %}"
    + _TURNS_END
)

KEY_TAGS_IN_A_LINE = (
    KEY_TAGS.replace("\\n<", "<")
    .replace("\n<arg", "<arg")
    .replace("name + '\n'", "name")
    .replace("</arg_value>\n", "</arg_value>")
)

PYTHON = (
    "{% macro value(v) %}{% if v is string %}"
    r"{{ '\'' + v | replace('\\', '\\\\') | replace('\'', '\\\'') | replace('\n', '\\n') + '\'' }}"
    "{% else %}{{ v }}{% endif %}{% endmacro %}"
    + _TURNS
    + "{% if m.tool_calls %}{{ '<|tool_call_start|>[' }}{% for c in m.tool_calls %}{{ c.function.name + '(' }}"
    "{% for k, v in c.function.arguments.items() %}{{ k + '=' }}{{ value(v) }}{{ ', ' if not loop.last }}{% endfor %}"
    "{{ ')' }}{{ ', ' if not loop.last }}{% endfor %}{{ ']<|tool_call_end|>' }}{% endif %}" + _TURNS_END
)
