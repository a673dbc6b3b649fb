"""Short chat templates that write calls of tools as the families of models do whose templates are too long to copy."""

from __future__ import annotations

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
