// Command manager is Kubernetes' kube-controller-manager, for tests only (make e2e-kube), with the controller of Jobs.
package main

import (
	"os"

	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/kube-controller-manager/app"
)

func main() { os.Exit(cli.Run(app.NewControllerManagerCommand())) }
