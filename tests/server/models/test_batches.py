"""A batch on a server of several models: each line names its model, which is loaded for it."""

from __future__ import annotations

from pathlib import Path

from tests.lazily import openai
from tests.server.http.test_http_batches import answers, begin, ended, line
from tests.server.models.running import KEY, front, two_models


def test_each_line_is_answered_by_the_model_that_it_names(tmp_path: Path) -> None:
    models = ["big", "small", "none"]
    (tmp_path / "models").mkdir()
    with front(two_models(tmp_path / "models"), batches=str(tmp_path / "batches")) as serving:
        client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key=KEY, max_retries=0)
        lines = [line(f"{model}{n}", model=model) for n in range(3) for model in models]
        end = ended(client, begin(client, lines))
        assert dict(end.request_counts) == {"total": 9, "completed": 6, "failed": 3}
        texts = {model: serving.ask(model, **line("x")["body"]).json()["choices"][0]["text"] for model in models[:2]}
        assert texts["big"] != texts["small"]
        for told in answers(client, end.output_file_id):
            body = told["response"]["body"]
            assert body["model"] == told["custom_id"][:-1]
            assert body["choices"][0]["text"] == texts[body["model"]]
        failed = [one["response"] for one in answers(client, end.error_file_id)]
        assert [(one["status_code"], one["body"]["error"]["code"]) for one in failed] == [(404, "model_not_found")] * 3
