// small is a program with one module of others.
package main

import cdx "github.com/CycloneDX/cyclonedx-go"

func main() { println(cdx.NewBOM().BOMFormat) }
