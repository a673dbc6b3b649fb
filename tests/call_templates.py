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

INVOKE_TAGS = (  # MiniMax M2
    _TURNS + "{% if m.tool_calls %}{{ '\n<minimax:tool_call>\n' }}{% for c in m.tool_calls %}"
    "{{ '<invoke name=\"' + c.function.name + '\">\n' }}{% for k, v in c.function.arguments.items() %}"
    "{{ '<parameter name=\"' + k + '\">' + (v if v is string else v | tojson) + '</parameter>\n' }}{% endfor %}"
    "{{ '</invoke>\n' }}{% endfor %}{{ '</minimax:tool_call>' }}{% endif %}" + _TURNS_END
)

TYPED_TAGS = (  # DeepSeek V3.2: the tag of an argument tells whether it is a string
    _TURNS + "{% if m.tool_calls %}{{ '\n\n<｜DSML｜function_calls>\n' }}{% for c in m.tool_calls %}"
    "{{ '<｜DSML｜invoke name=\"' + c.function.name + '\">\n' }}{% for k, v in c.function.arguments.items() %}"
    "{{ '<｜DSML｜parameter name=\"' + k + '\" string=\"' + ('true' if v is string else 'false') + '\">' }}"
    "{{ (v if v is string else v | tojson) + '</｜DSML｜parameter>\n' }}{% endfor %}"
    "{{ '</｜DSML｜invoke>\n' }}{% endfor %}{{ '</｜DSML｜function_calls>' }}{% endif %}" + _TURNS_END
)

SEED_TAGS = (  # Seed-OSS
    PARAMETER_TAGS.replace("tool_call>", "seed:tool_call>")
    .replace("'>\n' }}{{ v", "'>' }}{{ v")
    .replace("{{ '\n</parameter>", "{{ '</parameter>")
)

STEP_TAGS = (  # Step 3
    _TURNS + "{% if m.tool_calls %}{{ '<｜tool_calls_begin｜>\n' }}{% for c in m.tool_calls %}"
    "{{ '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"' + c.function.name + '\">\n' }}"
    "{% for k, v in c.function.arguments.items() %}"
    "{{ '<steptml:parameter name=\"' + k + '\">' + (v if v is string else v | tojson) + '</steptml:parameter>\n' }}"
    "{% endfor %}{{ '</steptml:invoke><｜tool_call_end｜>\n' }}{% endfor %}{{ '<｜tool_calls_end｜>' }}{% endif %}"
    + _TURNS_END
)

_JSON_FIELDS = (
    "{% for k, v in c.function.arguments.items() %}{{ k + '=' + v | tojson }}{{ ', ' if not loop.last }}{% endfor %}"
)

PYTHON_LINES = (  # OLMo 3: strings as in JSON, a call in a line
    _TURNS
    + "{% if m.tool_calls %}{{ '<function_calls>' }}{% for c in m.tool_calls %}{{ c.function.name + '(' }}"
    + _JSON_FIELDS
    + "{{ ')' }}{{ '\n' if not loop.last }}{% endfor %}{{ '</function_calls>' }}{% endif %}"
    + _TURNS_END
)

PYTHON_LIST = (  # Llama 3.2 and 4: no marker
    _TURNS
    + "{% if m.tool_calls %}{{ '[' }}{% for c in m.tool_calls %}{{ c.function.name + '(' }}"
    + _JSON_FIELDS
    + "{{ ')' }}{{ ', ' if not loop.last }}{% endfor %}{{ ']' }}{% endif %}"
    + _TURNS_END
)

DEEPSEEK = (  # V3 and R1: arguments as text, in a block of code
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% set ns = namespace(out=false) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.out = false %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'assistant' and m.tool_calls %}{{ '<｜Assistant｜>' + (m.content or '') }}"
    "{{ '<｜tool▁calls▁begin｜>' }}{% for c in m.tool_calls %}{{ '\n' if not loop.first }}"
    "{{ '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\n```json\n' + c.function.arguments }}"
    "{{ '\n```<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' + eos_token }}"
    "{% elif m.role == 'assistant' %}{{ '<｜tool▁outputs▁end｜>' if ns.out else '<｜Assistant｜>' }}"
    "{% set ns.out = false %}{{ m.content + eos_token }}"
    "{% elif m.role == 'tool' %}{{ '' if ns.out else '<｜tool▁outputs▁begin｜>' }}"
    "{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% set ns.out = true %}"
    "{% endif %}{% endfor %}{{ '<｜tool▁outputs▁end｜>' if ns.out }}"
    "{{ '<｜Assistant｜>' if add_generation_prompt and not ns.out }}"
)

DEEPSEEK_SHORT = (  # V3.1
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '<｜User｜>' + m.content }}{% elif m.role == 'assistant' %}"
    "{{ '<｜Assistant｜></think>' if messages[loop.index0 - 1].role == 'user' }}{{ m.content or '' }}"
    "{% if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}{% for c in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}"
    "{% endfor %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}{{ eos_token }}{% elif m.role == 'tool' %}"
    "{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role == 'user' %}"
    "{{ '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{% endif %}"
)

KIMI = (  # an id holds the function's name, and stands in its place
    "{% if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_' + ('system' if m.role == 'tool' else m.role) + '|>' + (m.name or m.role) }}"
    "{{ '<|im_middle|>' }}{% if m.role == 'assistant' and m.tool_calls %}{{ m.content or '' }}"
    "{{ '<|tool_calls_section_begin|>' }}{% for c in m.tool_calls %}{% set a = c.function.arguments %}"
    "{{ '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' + (a if a is string else a | tojson) }}"
    "{{ '<|tool_call_end|>' }}{% endfor %}{{ '<|tool_calls_section_end|>' }}"
    "{% elif m.role == 'tool' %}{{ '## Return of ' + m.tool_call_id + '\n' + m.content }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)


def _json_list(begin: str, end: str, name: str = "name", arguments: str = "arguments", separator: str = ", ") -> str:
    call = '{"' + name + '": "\' + c.function.name + \'", "' + arguments + "\": ' + c.function.arguments | tojson + '}"
    calls = f"{{% for c in m.tool_calls %}}{{{{ '{call}{separator}' if not loop.last else '{call}' }}}}{{% endfor %}}"
    return f"{_TURNS}{{% if m.tool_calls %}}{{{{ '{begin}' }}}}{calls}{{{{ '{end}' }}}}{{% endif %}}{_TURNS_END}"


GRANITE = _json_list("<|tool_call|>[", "]")
PHI = _json_list("<|tool_call|>[", "]<|/tool_call|>")
NEMOTRON = _json_list("<TOOLCALL>[", "]</TOOLCALL>")
JAMBA = _json_list("<tool_calls>[\n", "\n]</tool_calls>", separator=",\n")
XLAM = _json_list("[", "]")  # no marker
FIREFUNCTION = _json_list(" functools[", "]")
MINIMAX = _json_list("<tool_calls>\\n", "\\n</tool_calls>\\n", separator="\\n")  # M1: a call in a line
COMMAND_R = _json_list("Action: ```json\\n[", "]```", "tool_name", "parameters", ",\\n")
FALCON = _json_list("<|tool_calls|>", "<|/tool_calls|>", separator="<|tool_sep|>")

INTERNLM = (
    _TURNS + '{% for c in m.tool_calls or [] %}{{ \'<|action_start|><|plugin|>\n{"name": "\' + c.function.name }}'
    "{{ '\", \"parameters\": ' + c.function.arguments | tojson + '}<|action_end|>\n' }}{% endfor %}" + _TURNS_END
)

APERTUS = (  # the name is the only field of an object
    _TURNS + "{% if m.tool_calls %}{{ '<|tools_prefix|>[' }}{% for c in m.tool_calls %}"
    "{{ '{\"' + c.function.name + '\": ' + c.function.arguments | tojson + '}' }}{{ ', ' if not loop.last }}"
    "{% endfor %}{{ ']<|tools_suffix|>' }}{% endif %}" + _TURNS_END
)

HUNYUAN = (
    _TURNS + "{% if m.tool_calls %}{{ '<tool_calls>' }}{% for c in m.tool_calls %}"
    "{{ '\n<tool_call>function<tool_sep>' + c.function.name + '\n```json\n' + c.function.arguments | tojson }}"
    "{{ '\n```</tool_call>' }}{% endfor %}{{ '\n</tool_calls>' }}{% endif %}" + _TURNS_END
)

FUNCTION_TAGS = (  # Functionary
    _TURNS + "{% for c in m.tool_calls or [] %}"
    "{{ '<function=' + c.function.name + '>' + c.function.arguments | tojson + '</function>' }}{% endfor %}"
    + _TURNS_END
)


def _json_calls(begin: str, end: str, arguments: str = "arguments") -> str:
    """Each call between marks of its own."""
    call = (
        begin
        + '{"name": "\' + c.function.name + \'", "'
        + arguments
        + "\": ' + c.function.arguments | tojson + '}"
        + end
    )
    return f"{_TURNS}{{% for c in m.tool_calls or [] %}}{{{{ '{call}' }}}}{{% endfor %}}{_TURNS_END}"


LONGCAT = _json_calls("<longcat_tool_call>", "</longcat_tool_call>\\n")
EXAONE = _json_calls("<tool_call>", "</tool_call>")
GIGACHAT = _json_calls("<|function_call|>", "<|message_sep|>")
SOLAR = _json_calls("<|tool_call:begin|>", "<|tool_call:end|>", "args")

COMMAND = (  # Command R7B and A: an id, the number of the call, before the name
    _TURNS + "{% if m.tool_calls %}{{ '<|START_ACTION|>[\n' }}{% for c in m.tool_calls %}"
    '{{ \'    {"tool_call_id": "\' + loop.index0 | string + \'", "tool_name": "\' + c.function.name }}'
    "{{ '\", \"parameters\": ' + c.function.arguments | tojson + '}' + (',\n' if not loop.last else '\n') }}"
    "{% endfor %}{{ ']<|END_ACTION|>' }}{% endif %}" + _TURNS_END
)

TYPED_CALLS = (  # IBM's and others' lists in OpenAI's own shape
    _TURNS + "{% if m.tool_calls %}{{ '<|tool_calls|>[' }}{% for c in m.tool_calls %}"
    '{{ \'{"type": "function", "function": {"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments | tojson + '}}' + (', ' if not loop.last else '') }}{% endfor %}{{ ']' }}{% endif %}"
    + _TURNS_END
)
