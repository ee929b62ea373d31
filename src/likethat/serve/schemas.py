"""The shape of the answers, for the OpenAPI document. The answers themselves are made as for `explain --json`."""

from __future__ import annotations

from pydantic import BaseModel, Field


class SourcePatch(BaseModel):
    path: str
    class_: str = Field(alias="class")
    box: list[float] = Field(description="x0, y0, x1, y1 in pixels of the training image's file")


class MatchAnswer(BaseModel):
    prototype: int
    name: str | None = Field(description="given to the prototype by a person")
    similarity: float
    box: list[float] = Field(description="x0, y0, x1, y1 in pixels of the picture's file")
    attribution: str = Field(description="how the box was found")
    source: SourcePatch


class RowAnswer(MatchAnswer):
    weight: float
    points: float


class GroupAnswer(BaseModel):
    prototypes: list[int] = Field(description="of one class, which show the same part, strongest first")
    points: float = Field(description="their sum")
    box: list[float] = Field(description="that of the strongest")


class SheetAnswer(BaseModel):
    name: str
    logit: float
    probability: float
    rows: list[RowAnswer]
    groups: list[GroupAnswer] = Field(description="the same rows by the part they show, strongest first")


class NearestAnswer(BaseModel):
    prototype: int
    class_: str = Field(alias="class")
    similarity: float


class VerdictAnswer(BaseModel):
    level: float
    prediction_set: list[str] = Field(description="holds the true class at the level")
    informed: bool = Field(description="whether there were enough validation images for the level")
    likeness: float
    unlike: bool = Field(description="whether the picture is unlike everything known")
    abstains: bool
    nearest: NearestAnswer
    remedy: str | None = Field(None, description="what a higher level takes, where validation images are too few")


class ImageAnswer(BaseModel):
    path: str | None = Field(description="the picture's name, as the client gave it")
    predicted: str
    verdict: VerdictAnswer | None = Field(None, description="of runs that were calibrated")
    attribution: str = Field(description="how the parts of the picture were found")
    hidden: list[list[float]] | None = Field(None, description="parts that were painted over, as asked for")
    classes: list[SheetAnswer]
    nearest: list[MatchAnswer]
    against: str | None = None
    difference: list[RowAnswer] | None = None
    difference_groups: list[GroupAnswer] | None = None
    maps: dict[str, list[list[float]]] | None = None
    sheet: None = None


class SkippedAnswer(BaseModel):
    path: str | None
    reason: str


class ExplainAnswer(BaseModel):
    images: list[ImageAnswer]
    skipped: list[SkippedAnswer]


class PrototypeAnswer(BaseModel):
    id: int
    class_: str = Field(alias="class")
    name: str | None = Field(None, description="given by a person")
    network: int
    path: str
    box: list[float]
    row: int
    column: int
    moved: float
    weight: float = Field(description="of the connection to its own class")
    other_weights: dict[str, float]
    crop: str = Field(description="address of the patch's picture")
    source: str = Field(description="address of the training picture")
    source_size: list[int]
    source_box: list[float] = Field(description="shares of the training picture")
    purity: float | None
    val_purity: float | None
    mixed: bool | None
    leads: int | None
    repeats: int | None


class PrototypesAnswer(BaseModel):
    count: int = Field(description="how many fit, of which `prototypes` are a part")
    atlas: bool = Field(description="whether neighbours and purity are known")
    prototypes: list[PrototypeAnswer]


class NeighbourAnswer(BaseModel):
    path: str
    class_: str = Field(alias="class")
    similarity: float
    distance: float
    row: int
    column: int
    box: list[float]
    picture: str
    share: list[float]


class OnePrototypeAnswer(PrototypeAnswer):
    train: list[NeighbourAnswer] | None
    val: list[NeighbourAnswer] | None


class HealthAnswer(BaseModel):
    status: str
