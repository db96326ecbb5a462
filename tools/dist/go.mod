// A module of its own: the libraries that make images and bills of materials get into no program.
module dlrover-run/tools/dist

go 1.26.0

require (
	github.com/CycloneDX/cyclonedx-go v0.12.0
	github.com/stretchr/testify v1.12.1
)

require go.yaml.in/yaml/v3 v3.0.5 // indirect
