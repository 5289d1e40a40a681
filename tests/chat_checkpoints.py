"""Directories with a tokenizer and a chat template, of the forms that released models have.

The templates are written here, after those of Dream (as Qwen2.5's), SDAR (as Qwen3's), LLaDA,
LLaDA-MoE and LLaDA2: their roles, defaults, trimming, reasoning, tools and control of white space.
Only files: nothing of effuse is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

DREAM = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'Be helpful.' }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}
                {%- set call = call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""  # noqa: E501

SDAR = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" + (tool | tojson(ensure_ascii=true)) }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and not message.content.startswith('<tool_response>') %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- generation %}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {%- if call.arguments is string %}
                {{- call.arguments }}
            {%- else %}
                {{- call.arguments | tojson(separators=(',', ':')) }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' ~ (message.name or message.tool_call_id or '') }}
        {{- '\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role != "system" %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""  # noqa: E501

# It always begins an answer, even without add_generation_prompt, and trims messages.
LLADA = (
    "{% for message in messages %}"
    "{% set said = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.first %}{% set said = bos_token + said %}{% endif %}{{ said }}{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)

# Roles in capitals between tokens of their own; LLaDA-MoE's.
LLADA_MOE = (
    "{% for message in messages %}{% set role = message['role'] | lower %}"
    "{% if role not in ['system', 'user', 'assistant'] %}"
    "{% if role == 'tool' %}{% continue %}{% endif %}"
    "{{ raise_exception('no such role') }}{% endif %}"
    "{% if role == 'user' %}{% set role = 'HUMAN' %}{% endif %}"
    "{{ '<role>' + role | upper + '</role>' + message['content'] + '<|role_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<role>ASSISTANT</role>' }}{% endif %}"
)

LLADA2 = """{% set thinking = 'on' if enable_thinking is defined and enable_thinking else 'off' %}
{{- '<role>SYSTEM</role>' }}
{%- if messages[0].role == 'system' %}
    {{- messages[0].content + '\\n' }}
{%- endif %}
{%- if tools %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" + tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n" }}
{%- endif %}
{{- 'detailed thinking ' + thinking + '<|role_end|>' }}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- '<role>HUMAN</role>' + message.content + '<|role_end|>' }}
    {%- elif message.role == "system" and not loop.first %}
        {{- '<role>SYSTEM</role>' + message.content + '<|role_end|>' }}
    {%- elif message.role == "assistant" %}
        {{- '<role>ASSISTANT</role>' + (message.content or '').split('</think>')[-1].lstrip('\\n') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' ~ (call | tojson(indent=2)) ~ '</tool_call>' }}
        {%- endfor %}
        {{- '<|role_end|>' }}
    {%- elif message.role == "tool" %}
        {{- '<role>OBSERVATION</role>\\n<tool_response>\\n' + message.content + '\\n</tool_response><|role_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<role>ASSISTANT</role>' }}
{%- endif %}
"""  # noqa: E501

# Text in parts, whole messages as JSON, and every variable, in their order.
PARTS = """
{%- macro text_of(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}{%- for part in content or [] %}{{- part.text if part.type == 'text' }}{%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for tool in tools or [] %}{{- tool | tojson(indent=1, sort_keys=true) ~ '\\n' }}{%- endfor %}
{%- for document in documents or [] %}{{- document | tojson ~ '\\n' }}{%- endfor %}
{%- if given is defined %}{{- given ~ '\\n' ~ (given | tojson) ~ '\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + text_of(message.content) }}
    {%- if message.tool_calls or message.tool_call_id or message.thinking %}
        {{- '\\n' ~ (message | tojson) }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

TEMPLATES = {
    "dream": DREAM, "sdar": SDAR, "llada": LLADA, "llada_moe": LLADA_MOE, "llada2": LLADA2,
    "parts": PARTS,
}  # fmt: skip
QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
ROLES = ("<|startoftext|>", "<|endoftext|>", "<role>", "</role>", "<|role_end|>", "<|mask|>")
HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
SPECIAL = {
    "dream": QWEN, "sdar": QWEN, "llada": (*ROLES, *HEADERS), "llada_moe": ROLES, "llada2": ROLES,
    "parts": QWEN,
}  # fmt: skip
ANSWER_ENDS = {
    "dream": "<|im_end|>", "sdar": "<|im_end|>", "parts": "<|im_end|>",
    "llada": "<|eot_id|>", "llada_moe": "<|role_end|>", "llada2": "<|role_end|>",
}  # fmt: skip
ADDED = ("<think>", "</think>", "<tool_response>", "</tool_response>")
"""Added tokens that are not special, as in Qwen3's vocabulary."""

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CORPUS = ("Be helpful. What is the answer? How many are there? system user assistant\n\n" * 9,)


def write_chat_checkpoint(
    directory: Path, form: str, *, changes: Mapping[str, object] | None = None
) -> Path:
    """Writes tokenizer.json and tokenizer_config.json; `changes` are of the latter's fields."""
    special = SPECIAL[form]
    backend = tokenizers.Tokenizer(BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(_WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(_CORPUS, trainer)
    backend.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in special]
    )
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in ADDED])
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special[0],
        "eos_token": {"__type": "AddedToken", "content": "<|endoftext|>", "special": True},
        "chat_template": TEMPLATES[form],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config | dict(changes or {})))
    return directory
