"""Pictures from visitors: limited in bytes, number, time and pixels, and decoded by the one safe decoder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from likethat.data.decode import ImageError, read_image
from likethat.explaining.draw.render import shrink
from likethat.explaining.files import KEPT_SIDE
from likethat.runs.classifier import Classifier, PreparedPicture
from likethat.serve.limits import Limits
from likethat.serve.problems import Refused

LONGEST_NAME = 200
FIELD_BYTES = 65_536  # of a field that is not a file


@dataclass(frozen=True)
class Upload:
    """A picture's bytes. Its name is what the client called it: shown, never opened."""

    name: str | None
    data: bytes


async def read_uploads(request: Request, limits: Limits) -> list[Upload]:
    """Return the parts called `file` of a multipart body, or the whole body of any other kind."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_form = kind == "multipart/form-data"
    if is_form:
        return await _read_form(request, limits)
    data = b"".join([chunk async for chunk in _limited(request, limits.file_bytes)])
    if not data:
        raise Refused(400, "No picture came; send it as the body, or as the field 'file' of a form.")
    return [Upload(None, data)]


async def _limited(request: Request, most: int) -> AsyncIterator[bytes]:
    """Yield a body that is one picture, which may have less than a request."""
    problem = Refused(413, f"At most {most // 1_000_000} MB are taken at once; send a smaller picture.")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > most:
        raise problem
    total = 0
    async for chunk in request.stream():
        total += len(chunk)
        if total > most:
            raise problem
        yield chunk


async def _read_form(request: Request, limits: Limits) -> list[Upload]:
    parser = MultiPartParser(
        request.headers,
        request.stream(),
        max_files=limits.files,
        max_fields=limits.files,
        max_part_size=FIELD_BYTES,
    )
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError, LookupError) as error:  # the parser raises all of them
        raise Refused(400, f"The form cannot be read ({error}); send pictures in fields called 'file'.") from error
    try:
        uploads = []
        for part in form.getlist("file"):
            if isinstance(part, UploadFile):
                if part.size is not None and part.size > limits.file_bytes:
                    raise Refused(413, f"A picture may have at most {limits.file_bytes // 1_000_000} MB; send less.")
                name = (part.filename or "").replace("\\", "/").rpartition("/")[2][:LONGEST_NAME]
                uploads.append(Upload(name or None, await part.read()))
    finally:
        await form.close()
    if not uploads:
        raise Refused(400, "The form has no file in a field called 'file'; send the picture there, with a file name.")
    return uploads


def prepare_upload(classifier: Classifier, upload: Upload, limits: Limits) -> PreparedPicture:
    """Prepare the picture for the networks, with a small copy in place of the full picture."""
    name, value_range = upload.name or "the picture", classifier.value_range
    image = read_image(upload.data, name=name, value_range=value_range, max_pixels=limits.pixels)
    prepared = classifier.prepare(image)
    return replace(prepared, image=shrink(image, KEPT_SIDE))


def status_of(error: ImageError) -> int:
    return 413 if error.kind == "bomb" else 422
