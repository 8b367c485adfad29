"""Overrides to paste for rows that no format fits, by the names of their columns."""

from collections.abc import Mapping, Sequence

# Names that columns often have, the usual ones first.
_ASKED = ("prompt", "question", "query", "problem", "instruction", "input", "user", "human", "source", "document",
          "article", "text", "q", "inputs", "request", "post")  # fmt: skip
_ANSWERED = ("completion", "answer", "response", "solution", "output", "assistant", "gpt", "target", "summary", "reply",
             "a", "targets", "bot", "highlights", "label_text", "generated_solution", "final_answer")  # fmt: skip
_CONTEXT = ("context", "passage", "background", "paragraph", "evidence", "table", "code")
_CHOSEN = (
    "chosen",
    "response_j",
    "chosen_response",
    "preferred",
    "good",
    "better",
    "accepted",
    "winner",
    "response_chosen",
)
_REJECTED = ("rejected", "response_k", "rejected_response", "dispreferred", "bad", "worse", "declined", "loser",
             "response_rejected")  # fmt: skip


def proposal(rows: Sequence[Mapping[str, object]], place: str) -> str:
    """How the rows can be read, as overrides to paste; empty: their columns have unusual names."""
    texts = (
        [name for name in rows[0] if all(isinstance(row.get(name), str) and row[name] for row in rows)] if rows else []
    )
    by_name = {str(name).lower().replace("-", "_").replace(" ", "_"): str(name) for name in texts}

    def first(names: Sequence[str]) -> str | None:
        return next((by_name[name] for name in names if name in by_name), None)

    pair = {"chosen": first(_CHOSEN), "rejected": first(_REJECTED)}
    answers = pair if all(pair.values()) else {"completion": first(_ANSWERED)}
    taken = set(answers.values())
    asked = next((by_name[name] for name in _ASKED if by_name.get(name) not in (None, *taken)), None)
    context = first(_CONTEXT)
    if asked is None or None in taken:
        return ""
    renamed = {ours: theirs for ours, theirs in {"prompt": asked, **answers}.items() if ours != theirs}
    template = ""
    if context:
        template = f"prompt_template='{{{context}}} {{{asked}}}'"
        renamed.pop("prompt", None)
    columns = ", ".join(f"{ours}: {_quoted(theirs)}" for ours, theirs in renamed.items() if theirs)
    of_data = [
        *(f"columns.{ours}={_shell(str(theirs))}" for ours, theirs in renamed.items()),
        *([template] if template else []),
    ]
    of_pipeline = [
        *([f"'sources.NAME.columns={{{columns}}}'"] if columns else []),
        *([f'"stages.STAGE.method.{template}"'] if template else []),
    ]
    return (
        f"posttrain data {_shell(place)} {' '.join(of_data)} reads them; a pipeline does with {' '.join(of_pipeline)}"
    )


def _quoted(name: str) -> str:
    return name if name.replace("_", "").isalnum() else f'"{name}"'


def _shell(word: str) -> str:
    return word if word.replace("_", "").replace(".", "").replace("/", "").replace("-", "").isalnum() else f"'{word}'"
