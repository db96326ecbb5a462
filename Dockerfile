# Static programs: one COPY puts them into any training image,
#   COPY --from=dlrover-run /usr/local/bin/dlrover-run /usr/local/bin/
#   ENTRYPOINT ["dlrover-run"]
# With dlroverctl, and RUN dlroverctl install-names /usr/local/bin, it takes the place of torchrun, deepspeed and msrun.
# gpucheck beside it checks NVIDIA GPUs; it needs glibc 2.34 and the driver's libraries, so it does nothing in this image.
FROM golang:1.26-bookworm AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG VERSION=dev
RUN make build VERSION=${VERSION} && bin/dlroverctl install-names bin

FROM scratch
COPY --from=build /src/bin/ /usr/local/bin/
ENV PATH=/usr/local/bin
USER 65534:65534
ENTRYPOINT ["/usr/local/bin/dlrover-run"]
